"""Settings and variables of processes on several machines: addresses, ranks, security. Imports no Ray."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from seedrl.config import RunConfig, SecurityConfig
from seedrl.errors import ConfigError
from seedrl.launching.actors import actor_settings
from seedrl.launching.overrides import override
from seedrl.wire.security import check_client_security, check_learner_security, is_local, is_socket

HERE = "127.0.0.1"


class RankAddress(NamedTuple):
    """The machine of a rank and its ports there."""

    number: int
    node: str
    address: str  # the address of that machine
    port: int  # a free one there, to listen on
    meeting_port: int  # another, for all ranks to meet at if this is the first


def refuse_exposure(config: RunConfig, addresses: set[str]) -> None:
    """Refuse settings that the learner or its actors would refuse later, on whichever machine they are."""
    if len(addresses) == 1:
        return
    if config.listen and is_local(config.listen):
        raise ConfigError(
            f"listen={config.listen} can be reached from one machine, and the cluster has {len(addresses)}"
        )
    for address in sorted(addresses):
        anywhere = f"{_bracketed(address)}:0"
        check_learner_security(replace(config, listen=config.listen or anywhere))
        check_client_security(anywhere, _actor_security(config))


def rank_variables(
    config: RunConfig, rank: RankAddress, ranks: Sequence[RankAddress], is_one_machine: bool
) -> dict[str, str]:
    """Return the environment variables that torchrun would give a rank."""
    return {
        "RANK": str(rank.number),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(_local_rank(config, rank, ranks)),
        "LOCAL_WORLD_SIZE": str(len(_beside(rank, ranks))),
        "MASTER_ADDR": HERE if is_one_machine else ranks[0].address,
        "MASTER_PORT": str(ranks[0].meeting_port),
    }


def rank_settings(
    config: RunConfig, rank: RankAddress, ranks: Sequence[RankAddress], is_one_machine: bool
) -> tuple[list[str], str]:
    """Return a rank's settings and the address that actors connect to.

    Further ranks of a machine take the ports that follow listen's. A rank adds its LOCAL_RANK to the port in its
    settings (seedrl/ranks/settings.py), so that is subtracted here.
    """
    listen, number = config.listen, _beside(rank, ranks).index(rank)
    if is_socket(listen):
        return [override("listen", listen)], f"{listen}.{number}" if number else listen
    host, _, first = listen.rpartition(":")
    host = host or (HERE if is_one_machine else _bracketed(rank.address))
    port = int(first) + number if int(first or 0) else rank.port
    settings = [override("listen", f"{host}:{port - _local_rank(config, rank, ranks)}")]
    if is_local(f"{host}:{port}"):
        return settings, f"{host}:{port}"
    address = _bracketed(rank.address)
    return [*settings, override("ranks.advertise", address)], f"{address}:{port}"


def _beside(rank: RankAddress, ranks: Sequence[RankAddress]) -> list[RankAddress]:
    """Return all ranks on the machine of a rank."""
    return [each for each in ranks if each.node == rank.node]


def _local_rank(config: RunConfig, rank: RankAddress, ranks: Sequence[RankAddress]) -> int:
    """Return LOCAL_RANK. An engine that gives out accelerators shows each rank only its own, which is number 0."""
    return 0 if config.launch.learner.gpus else _beside(rank, ranks).index(rank)


def remote_actor_settings(config: RunConfig, learner: str, name: str) -> list[str]:
    """Return the settings of an actor that may be on another machine than its learner."""
    security = vars(_actor_security(config))
    return [*actor_settings(config, learner, name), *(override(f"security.{key}", security[key]) for key in security)]


def _actor_security(config: RunConfig) -> SecurityConfig:
    given = config.launch.security
    return replace(
        given,
        token_file=given.token_file or config.security.token_file,
        allow_insecure=given.allow_insecure or config.security.allow_insecure,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
