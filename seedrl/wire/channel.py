"""gRPC as both ends use it: options, the service's methods, a client's link to a learner. Knows nothing of sessions."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from seedrl.config import SecurityConfig
from seedrl.errors import ConfigError, LearnerLost, Unauthenticated
from seedrl.status import Status
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec, tls
from seedrl.wire.control import parse_control_response, serialize_control_request
from seedrl.wire.messages import MAX_MESSAGE_BYTES, PING_PATIENCE, ActorMessage, ControlRequest, MemberResult
from seedrl.wire.security import check_client_security, client_exposures, is_socket
from seedrl.wire.status import parse_status
from seedrl.wire.tokens import Tokens

_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE = _DESCRIPTOR.full_name
METHODS = tuple(method.name for method in _DESCRIPTOR.methods)

MIB = 1024 * 1024

AUTHORIZATION, SCHEME = "authorization", "Bearer "  # where a call shows its token
Metadata = tuple[tuple[str, str], ...]

# Both ends ping every few seconds. A client gives up on a learner that does not answer for as long again. A learner is
# more patient, as a client in a language with one thread answers nothing while it computes; so that it still notices a
# lost client within 15 seconds, it pings more often.
CLIENT_PING_MS, SERVER_PING_MS = 5_000, 3_000
SHORTEST_PING_MS = 1_000  # between the pings of a client; its connection is closed after a few that come sooner


def _keepalive(ping_ms: int, patience_ms: int) -> list[tuple[str, Any]]:
    """Return the options. gRPC enforces the keepalive timeout only when the ping timeout is set as well."""
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(longest: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Return the options of a server that takes messages of up to `longest` bytes."""
    return [
        ("grpc.so_reuseport", 0),  # a second learner on the same port must fail, not share it
        ("grpc.max_receive_message_length", longest),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message must not become a large one
        ("grpc.max_concurrent_streams", 8),  # of one connection; an actor needs one
        ("grpc.max_metadata_size", 4096),
        ("grpc.absolute_max_metadata_size", 8192),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", SHORTEST_PING_MS),
        ("grpc.http2.max_ping_strikes", 2),
        *_keepalive(SERVER_PING_MS, int(1000 * PING_PATIENCE)),
    ]


def client_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", 4 * MIB),  # actions are small
        ("grpc.max_send_message_length", -1),  # the learner decides
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),  # the actor decides what is worth retrying
        ("grpc.enable_http_proxy", 0),  # an http_proxy variable would capture the stream
        ("grpc.use_local_subchannel_pool", 1),  # a new session starts with no back-off of the last one
        *_keepalive(CLIENT_PING_MS, CLIENT_PING_MS),
    ]


def service_handler(
    stream: Callable[[Any, Any], Any], status: Callable[[Any, Any], Any], control: Callable[[Any, Any], Any]
) -> Any:
    """Serve InferenceService. `stream` reads and writes records; the other two take and return bytes.

    gRPC hides an exception of a deserializer from everything but a stream, so a ControlRequest is parsed by `control`.
    """
    methods = {
        "Stream": grpc.stream_stream_rpc_method_handler(
            stream, request_deserializer=codec.parse_request, response_serializer=codec.serialize_response
        ),
        "Status": grpc.unary_unary_rpc_method_handler(status),
        "Control": grpc.unary_unary_rpc_method_handler(control),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


class Link:
    """A client's link to one learner: its address, the CA to trust, the token to show. Owned by one thread."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        check_client_security(address, security)
        self.address = address
        self.is_exposed = bool(client_exposures(address, security))
        self._security = security
        self._tokens = Tokens(security)
        self._has_tls = bool(security.ca_file) and not is_socket(address)
        if self._has_tls:
            tls.client_credentials(security)  # raises now; later it would look like a learner that is down

    def open(self) -> Any:
        """Return a new channel, with the certificates as they are now."""
        if self._has_tls:
            return grpc.secure_channel(self.address, tls.client_credentials(self._security), options=client_options())
        return grpc.insecure_channel(self.address, options=client_options())

    def metadata(self) -> Metadata:
        """Return the metadata of a call: the token, as it is now."""
        token = self._tokens.first()
        return ((AUTHORIZATION, SCHEME + token),) if token else ()

    def check(self, code: grpc.StatusCode, details: str) -> None:
        """Raise Unauthenticated if a call failed because the two ends do not trust each other."""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthenticated(f"the learner at {self.address} refused this call (UNAUTHENTICATED): {details}")
        may_be_tls = code is grpc.StatusCode.UNAVAILABLE and not is_socket(self.address)
        if may_be_tls and (reason := tls.trouble(self.address, self._security)):
            raise Unauthenticated(f"no connection to the learner at {self.address}: {reason}")


def open_stream(channel: Any, messages: Iterator[ActorMessage], metadata: Metadata = ()) -> Any:
    """Call InferenceService.Stream. The call iterates over bytes, which `codec.parse_response` reads.

    They are not parsed by gRPC, which would hide the exception.
    """
    call = channel.stream_stream(f"/{SERVICE}/Stream", request_serializer=codec.serialize_request)
    return call(messages, metadata=metadata)


def ask_status(link: Link, seconds: float) -> Status:
    """Call InferenceService.Status of a learner. Raises LearnerLost if no answer comes in time."""
    return parse_status(_ask(link, "Status", b"", seconds))


def ask_control(link: Link, order: ControlRequest, seconds: float) -> list[MemberResult]:
    """Call InferenceService.Control; return what became of it, for each session it was about.

    Raises LearnerLost if no answer comes in time, and ConfigError for a request that the learner refuses.
    """
    return parse_control_response(_ask(link, "Control", serialize_control_request(order), seconds))


def _ask(link: Link, method: str, request: bytes, seconds: float) -> bytes:
    with link.open() as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            answer: bytes = call(request, timeout=seconds, metadata=link.metadata())
            return answer
        except grpc.RpcError as error:
            link.check(error.code(), error.details())
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConfigError(f"the learner at {link.address} refuses the request: {error.details()}") from error
            raise LearnerLost(
                f"no learner answers at {link.address} ({error.code().name.lower()}: {error.details()})"
            ) from error
