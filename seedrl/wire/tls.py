"""TLS at both ends, and why a handshake fails: gRPC calls every such failure UNAVAILABLE. Knows nothing of tokens."""

import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc

from seedrl.config import SecurityConfig
from seedrl.errors import ConfigError

PROBE_SECONDS = 2.0  # for a learner to answer a handshake
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # as OpenSSL sees plain HTTP/2


def server_credentials(security: SecurityConfig) -> Any:
    """Return a learner's; with a CA, actors must show a certificate of it. Raises ConfigError if files do not fit."""
    _own_end(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
    pair = (_read(security.key_file), _read(security.certificate_file))
    ca = _read(security.ca_file) if security.ca_file else None
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def server_context(security: SecurityConfig) -> ssl.SSLContext:
    """Return the same for servers that are not gRPC's."""
    context = _own_end(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
    context.verify_mode = ssl.CERT_REQUIRED if security.ca_file else ssl.CERT_NONE
    return context


def client_credentials(security: SecurityConfig) -> Any:
    """Return an actor's, which trust only its CA. Raises ConfigError if the files do not fit."""
    _own_end(_client(), security)
    own = [_read(name) if name else None for name in (security.key_file, security.certificate_file)]
    return grpc.ssl_channel_credentials(_read(security.ca_file), *own)


def trouble(address: str, security: SecurityConfig) -> str:
    """Return why a connection to a learner fails, in words; empty if TLS is not the reason."""
    try:
        if not security.ca_file:
            _goes_on(address, _trusting(_client()))
            return "it uses TLS: give security.ca_file, the CA to trust"
        context = _own_end(_client(), security)
        if _goes_on(address, context) or _goes_on(address, context):  # again: it may have ended just then
            return ""
        return _about_own_certificate(security)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is refused: {_words(error)}"
    except ssl.SSLError as error:
        is_plain = security.ca_file and error.reason in NO_TLS
        return "it does not use TLS: give it a certificate, or leave security.ca_file out" if is_plain else ""
    except (OSError, ValueError):  # it is not there, or its address is none of ours
        return ""


def _goes_on(address: str, context: ssl.SSLContext) -> bool:
    """Return whether a learner sends anything after the handshake; it hangs up if it refuses our certificate."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as raw,
        context.wrap_socket(raw, server_hostname=host) as wrapped,
    ):
        return bool(wrapped.recv(1))


def _about_own_certificate(security: SecurityConfig) -> str:
    if not security.certificate_file:
        return "it asks for a certificate: give security.certificate_file and security.key_file"
    reason = _verified(security) or "it is of another CA than the learner trusts"
    return f"it refuses security.certificate_file={security.certificate_file}: {reason}"


def _verified(security: SecurityConfig) -> str:
    """Return why our own CA refuses our own certificate; empty if it does not. Two ends in memory shake hands."""
    server = _own_end(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
    server.verify_mode = ssl.CERT_REQUIRED
    client = _own_end(_trusting(_client()), security)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in 2 * ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _words(error)
    return ""


def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def _trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that trusts every certificate, for a handshake over which nothing is sent."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _own_end(context: ssl.SSLContext, security: SecurityConfig) -> ssl.SSLContext:
    """Return the context with our certificate and the CA we trust, if there are such."""
    certificate, key, ca = security.certificate_file, security.key_file, security.ca_file
    try:
        if certificate:
            context.load_cert_chain(certificate, key, password=lambda: "")  # an encrypted key fails instead of asking
    except OSError as error:
        words = f"security.certificate_file={certificate} and key_file={key} do not make a pair: {_words(error)}"
        raise ConfigError(words) from error
    try:
        if ca:
            context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"security.ca_file={ca} holds no certificates: {_words(error)}") from error
    return context


def _words(error: OSError) -> str:
    """Return the words of OpenSSL, without its line numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unusable").replace("_", " ").lower()
    return error.strerror or str(error)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
