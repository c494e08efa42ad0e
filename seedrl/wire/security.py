"""Decides who may connect: refuses to serve other machines without TLS and a token. Knows nothing of gRPC."""

import ipaddress
import os

from seedrl.config import TOKEN_VARIABLE, ActorConfig, LearnerConfig, SecurityConfig
from seedrl.errors import require


def is_socket(address: str) -> bool:
    return address.startswith("unix:")


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address. Every name but localhost counts as another machine's."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return is_socket(address) or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Return whether an address is one to listen on but not one to connect to, such as 0.0.0.0."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not is_socket(address) and ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def has_token(security: SecurityConfig) -> bool:
    return bool(security.token_file or os.environ.get(TOKEN_VARIABLE))


def exposures(config: LearnerConfig) -> list[str]:
    """Return what a learner serves to other machines without TLS and token, each with what is missing."""
    return stream_exposures(config) + endpoint_exposures(config.metrics)


def stream_exposures(config: LearnerConfig) -> list[str]:
    """Return the exposures of the stream, which is gRPC's."""
    return address_exposures("listen", config.listen, config.security)


def address_exposures(setting: str, address: str, security: SecurityConfig) -> list[str]:
    """Return the exposures of an address to listen on that has TLS and tokens if these are set."""
    missing = [] if security.certificate_file else ["TLS (security.certificate_file and key_file)"]
    missing += [] if has_token(security) else [f"a token (security.token_file or {TOKEN_VARIABLE})"]
    if not address or is_local(address) or not missing:
        return []
    return [f"{setting}={address} reaches beyond this machine without {' and '.join(missing)}"]


def endpoint_exposures(metrics: str) -> list[str]:
    """Return the exposures of the pages, which are HTTP's and have neither TLS nor token."""
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


def check_websocket_security(address: str, security: SecurityConfig) -> None:
    """Check an address for WebSocket clients, which is protected as a stream is."""
    _refuse(address_exposures("websocket", address, security), security)


def check_actor_security(config: ActorConfig) -> None:
    check_client_security(config.learner, config.security)
    _refuse([] if config.security.allow_open_pages else endpoint_exposures(config.metrics), config.security)


def check_client_security(learner: str, security: SecurityConfig) -> None:
    """Check the settings of a process that connects to a learner, such as an actor or `seedrl status`."""
    _check_pair(security)
    require(
        not security.certificate_file or bool(security.ca_file),
        "security.certificate_file is shown to a learner, which takes TLS: give security.ca_file, the CA to trust",
    )
    _refuse(client_exposures(learner, security), security)


def _check_pair(security: SecurityConfig) -> None:
    require(
        bool(security.certificate_file) == bool(security.key_file),
        "security.certificate_file and security.key_file need each other",
    )


def check_redirect(home: str, address: str, security: SecurityConfig) -> None:
    """Check a redirect of an actor whose learner is at `home`. A redirect must not make it trust more machines."""
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
    return [f"learner={learner} is beyond this machine, and without TLS (security.ca_file) others can read the stream"]


def _refuse(exposures: list[str], security: SecurityConfig) -> None:
    require(
        not exposures or security.allow_insecure,
        f"{'; '.join(exposures)}. see docs/security.md, or allow it with security.allow_insecure=true",
    )
