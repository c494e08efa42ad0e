"""Who may talk to whom: what is shown beyond this machine, and the refusal to do so without TLS and token."""

import ipaddress
import os

from seedrl.config import TOKEN_VARIABLE, ActorConfig, LearnerConfig, SecurityConfig
from seedrl.errors import require


def is_socket(address: str) -> bool:
    return address.startswith("unix:")


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address. A name counts as another machine's, except localhost."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return is_socket(address) or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Whether one can listen there, and nobody can connect to it."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not is_socket(address) and ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def has_token(security: SecurityConfig) -> bool:
    return bool(security.token_file or os.environ.get(TOKEN_VARIABLE))


def exposures(config: LearnerConfig) -> list[str]:
    """What a learner serves beyond this machine without TLS and token, each with what is missing."""
    return stream_exposures(config) + endpoint_exposures(config.metrics)


def stream_exposures(config: LearnerConfig) -> list[str]:
    """Of them, those by gRPC."""
    security = config.security
    missing = [] if security.certificate_file else ["TLS (security.certificate_file and key_file)"]
    missing += [] if has_token(security) else [f"a token (security.token_file or {TOKEN_VARIABLE})"]
    if not config.listen or is_local(config.listen) or not missing:
        return []
    return [f"listen={config.listen} reaches beyond this machine without {' and '.join(missing)}"]


def endpoint_exposures(metrics: str) -> list[str]:
    """The same for pages over HTTP, which have neither."""
    if metrics in ("", "auto") or is_local(metrics):
        return []
    return [f"metrics={metrics} reaches beyond this machine, and pages have neither TLS nor tokens"]


def check_learner_security(config: LearnerConfig) -> None:
    security = config.security
    _check_pair(security)
    require(
        not security.ca_file or bool(security.certificate_file),
        "security.ca_file demands certificates of actors, which takes TLS: give security.certificate_file and key_file",
    )
    pages = endpoint_exposures(config.metrics)
    _refuse(stream_exposures(config) + ([] if security.allow_open_pages else pages), security)


def check_actor_security(config: ActorConfig) -> None:
    check_client_security(config.learner, config.security)
    _refuse([] if config.security.allow_open_pages else endpoint_exposures(config.metrics), config.security)


def check_client_security(learner: str, security: SecurityConfig) -> None:
    """For whoever connects to a learner: actors and `seedrl status`."""
    _check_pair(security)
    require(
        not security.certificate_file or bool(security.ca_file),
        "security.certificate_file is shown to a learner, which takes TLS: give security.ca_file, whom to trust",
    )
    _refuse(client_exposures(learner, security), security)


def _check_pair(security: SecurityConfig) -> None:
    require(
        bool(security.certificate_file) == bool(security.key_file),
        "security.certificate_file and security.key_file need each other",
    )


def check_redirect(home: str, address: str, security: SecurityConfig) -> None:
    """For an actor of the learner at `home` that is sent elsewhere. Whoever sends it may not be trusted with more."""
    require(
        is_local(home) or not is_local(address),
        f"learner={home} is another machine's, and {address} is on this one; its ranks.advertise may be missing",
    )
    require(
        is_socket(home) or not is_socket(address),
        f"learner={home} has a port, and {address} is a file of this machine; its ranks.advertise may be missing",
    )
    check_client_security(address, security)


def client_exposures(learner: str, security: SecurityConfig) -> list[str]:
    if is_local(learner) or security.ca_file:
        return []
    return [
        f"learner={learner} is beyond this machine, and without TLS (security.ca_file) anybody between can read along"
    ]


def _refuse(exposures: list[str], security: SecurityConfig) -> None:
    require(
        not exposures or security.allow_insecure,
        f"{'; '.join(exposures)}. docs/security.md says how to have both; security.allow_insecure=true does without",
    )
