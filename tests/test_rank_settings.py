"""The settings of one rank, and the counters of all ranks together."""

import pytest

from seedrl.config import Display, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.metrics import LearningMetrics, ServingMetrics, totals_of
from seedrl.ranks.settings import generator_seed, settings_of_rank
from seedrl.run.identity import Identity, identity
from seedrl.run.totals import RETURNS_KEPT, counts_of, restore_counters, score_of, sum_over_ranks
from seedrl.wire.address import address_of_rank


def config_of(ranks: int, **settings: str) -> LearnerConfig:
    config = LearnerConfig(**settings)  # type: ignore[arg-type]
    config.ranks.count = ranks
    return config


def test_settings_of_one_rank_are_unchanged() -> None:
    config = config_of(1, listen="unix:/tmp/x", socket="unix:/tmp/y", metrics="auto")
    settings = settings_of_rank(config, Identity("learner"))
    assert (settings.listen, settings.socket, settings.metrics) == ("unix:/tmp/x", "unix:/tmp/y", "auto")
    assert settings.display is config.display


def test_settings_of_a_further_rank_have_addresses_of_its_own_and_leaves_the_terminal_to_rank_0() -> None:
    config = config_of(3, listen="[::1]:500", socket="unix:/tmp/y", metrics="127.0.0.1:9464")
    config.report.wandb = "mine"
    settings = settings_of_rank(config, Identity("learner", rank=2, world_size=3, local_rank=2))
    assert (settings.listen, settings.socket, settings.metrics) == ("[::1]:502", "unix:/tmp/y.2", "127.0.0.1:9466")
    assert settings.display is Display.plain
    assert settings.report.wandb == ""
    assert config.report.wandb == "mine"


def test_rank_shares_the_cores_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedrl.ranks.settings.available_cores", lambda: 32)
    assert settings_of_rank(config_of(8), Identity("learner", 1, 8, local_world_size=4)).threads == 4
    assert settings_of_rank(config_of(1), Identity("learner")).threads == 0  # half of those of whichever machine


@pytest.mark.parametrize(("count", "world"), [(2, 1), (1, 2), (4, 2)])
def test_settings_of_another_number_of_ranks_than_there_are_are_refused(count: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"ranks.count={count}, and {world} were started.*launch=torchrun"):
        settings_of_rank(config_of(count), Identity("learner", world_size=world))


@pytest.mark.parametrize(
    ("address", "rank", "expected"),
    [
        ("127.0.0.1:50051", 0, "127.0.0.1:50051"),
        ("127.0.0.1:50051", 3, "127.0.0.1:50054"),
        ("127.0.0.1:0", 3, "127.0.0.1:0"),
        ("unix:/a/b", 0, "unix:/a/b"),
        ("unix:/a/b", 3, "unix:/a/b.3"),
    ],
)
def test_address_of_a_rank_follows_from_that_of_rank_0(address: str, rank: int, expected: str) -> None:
    assert address_of_rank(address, rank) == expected


def test_generators_differ_between_ranks_and_lives_and_rank_0_has_that_of_a_run_of_one() -> None:
    assert generator_seed(5, rank=0, earlier_processes=0) == generator_seed(5, rank=0, earlier_processes=9) == 5
    seeds = {generator_seed(5, rank, earlier) for rank in (1, 2, 3) for earlier in (0, 9)}
    assert len({*seeds, 5}) == 7


def test_identity_of_a_rank_comes_from_what_torchrun_sets() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_NAME": "n"}
    assert identity("learner", variables) == Identity("learner", 3, 4, 1, "n", 2)
    assert str(identity("learner", variables)) == "learner rank 3/4 on n"


# Counting


def counted(rank: int) -> tuple[ServingMetrics, LearningMetrics]:
    serving, learning = ServingMetrics(), LearningMetrics()
    serving.env_steps, serving.episodes = 100 * (rank + 1), 7
    serving.rows_dropped["session_ended"] = 2
    serving.batch_rows.observe(3.0)
    serving.returns.extend(float(rank) for _ in range(80))
    learning.updates, learning.skipped_updates, learning.trained_steps = 40, 3, 500
    return serving, learning


def test_counts_of_ranks_add_up_but_for_updates_which_are_the_same_on_all() -> None:
    counts = sum_over_ranks([counts_of(*counted(rank)) for rank in range(3)])
    assert counts["serving"]["env_steps"] == 600
    assert counts["serving"]["rows_dropped"]["session_ended"] == 6
    assert sum(counts["serving"]["batch_rows"]["counts"]) == 3
    assert counts["learning"]["trained_steps"] == 1500
    assert (counts["learning"]["updates"], counts["learning"]["skipped_updates"]) == (40, 3)


def test_counts_of_ranks_hold_the_newest_returns_of_all_alike() -> None:
    returns = sum_over_ranks([counts_of(*counted(rank)) for rank in range(3)])["returns"]
    assert len(returns) == RETURNS_KEPT
    assert sorted(returns.count(float(rank)) for rank in range(3)) == [33, 33, 34]
    assert score_of({"returns": returns}) == pytest.approx(1.0, abs=0.02)
    assert score_of({"returns": returns[1:]}) is None


def test_counts_restored_by_rank_0_alone_go_on_in_the_sum_over_any_number_of_ranks() -> None:
    before = sum_over_ranks([counts_of(*counted(rank)) for rank in range(2)])
    restored = [(ServingMetrics(), LearningMetrics()) for _ in range(3)]
    for rank, (serving, learning) in enumerate(restored):
        restore_counters(before, serving, learning, rank)
        assert (learning.updates, learning.skipped_updates) == (40, 3)
    assert sum_over_ranks([counts_of(*each) for each in restored]) == before
    assert restored[1][0] == ServingMetrics()
    assert totals_of(restored[0][0]) == before["serving"]
