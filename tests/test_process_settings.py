"""What the processes of a job on several machines are told, without any machine."""

import pytest

from seedrl.config import RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.process_settings import (
    RankAddress,
    rank_settings,
    rank_variables,
    refuse_exposure,
    remote_actor_settings,
)

RANKS = [RankAddress(0, "a", "10.0.0.1", 4001, 5001), RankAddress(1, "b", "10.0.0.2", 4002, 5002)]
RANKS.append(RankAddress(2, "b", "10.0.0.2", 4003, 5003))


def test_ranks_are_told_what_torchrun_would_tell() -> None:
    said = [rank_variables(RunConfig(), rank, RANKS, is_one_machine=False) for rank in RANKS]
    assert [each["RANK"] for each in said] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in said] == ["0", "0", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in said] == ["1", "2", "2"]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in said} == {
        ("3", "10.0.0.1", "5001")
    }


def test_rank_with_accelerators_of_its_own_takes_the_first_that_it_sees() -> None:
    config = RunConfig()
    config.launch.learner.gpus = 0.5
    assert rank_variables(config, RANKS[2], RANKS, is_one_machine=False)["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("listen", "is_one_machine", "told", "found"),
    [
        ("", False, ["listen='10.0.0.2:4002'", "ranks.advertise='10.0.0.2'"], "10.0.0.2:4003"),
        ("", True, ["listen='127.0.0.1:4002'"], "127.0.0.1:4003"),
        ("0.0.0.0:50051", False, ["listen='0.0.0.0:50051'", "ranks.advertise='10.0.0.2'"], "10.0.0.2:50052"),
        ("127.0.0.1:50051", True, ["listen='127.0.0.1:50051'"], "127.0.0.1:50052"),
        ("unix:/tmp/l", True, ["listen='unix:/tmp/l'"], "unix:/tmp/l.1"),
    ],
)
def test_rank_listens_at_the_port_plus_its_number_on_the_machine(
    listen: str, is_one_machine: bool, told: list[str], found: str
) -> None:
    """RANKS[2] is the second one of its machine."""
    assert rank_settings(RunConfig(listen=listen), RANKS[2], RANKS, is_one_machine) == (told, found)


def test_rank_that_is_shown_one_accelerator_is_told_its_very_port() -> None:
    config = RunConfig(listen="0.0.0.0:50051")
    config.launch.learner.gpus = 1
    (listen, _), found = rank_settings(config, RANKS[2], RANKS, is_one_machine=False)
    assert (listen, found) == ("listen='0.0.0.0:50052'", "10.0.0.2:50052")


def test_actor_has_the_token_of_the_learner_and_a_trust_of_its_own() -> None:
    config = RunConfig()
    config.security.token_file, config.launch.security.ca_file = "token", "ca.pem"
    settings = remote_actor_settings(config, "10.0.0.1:4001", "actor-3")
    assert {"learner='10.0.0.1:4001'", "name='actor-3'", "security.ca_file='ca.pem'"} <= set(settings)
    assert [each for each in settings if "token" in each][-1] == "security.token_file='token'"
    assert "security.allow_insecure=false" in settings


def test_cluster_of_several_machines_calls_for_tls_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEEDRL_TOKEN", raising=False)
    config, two = RunConfig(), {"10.0.0.1", "10.0.0.2"}
    refuse_exposure(config, {"10.0.0.1"})  # only its own machine reaches it
    with pytest.raises(ConfigError, match=r"listen=10.0.0.1:0 reaches beyond this machine without TLS .* and a token"):
        refuse_exposure(config, two)
    config.security.certificate_file, config.security.key_file = "learner.pem", "learner.key"
    config.security.token_file = "token"
    with pytest.raises(ConfigError, match=r"learner=10.0.0.1:0 is beyond this machine, and without TLS"):
        refuse_exposure(config, two)
    config.launch.security.ca_file = "ca.pem"
    refuse_exposure(config, two)
    config.listen = "127.0.0.1:50051"
    with pytest.raises(ConfigError, match=r"listen=127.0.0.1:50051 can be reached from one machine, and .* has 2"):
        refuse_exposure(config, two)


def test_cluster_of_several_machines_does_without_if_told_so() -> None:
    config = RunConfig()
    config.security.allow_insecure = True
    refuse_exposure(config, {"10.0.0.1", "10.0.0.2"})
