"""gRPC as both ends use it: options, and the one method with our own (de)serializers."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from seedrl.errors import LearnerLost
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import framing

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

MIB = 1024 * 1024

# A peer that stopped answering is noticed after at most two of these. gRPC enforces the keepalive timeout
# only when the ping timeout is set as well.
KEEPALIVE_MS = 5_000

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(max_message_mb: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # a second learner on the same port must fail, not share it
        ("grpc.max_receive_message_length", max_message_mb * MIB),
        ("grpc.max_send_message_length", max_message_mb * MIB),
        ("grpc.max_concurrent_streams", 8),  # of one connection; an actor needs one
        ("grpc.max_metadata_size", 4096),
        ("grpc.absolute_max_metadata_size", 8192),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
        ("grpc.http2.max_ping_strikes", 2),
        *_KEEPALIVE,
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
        *_KEEPALIVE,
    ]


def service_handler(stream: Callable[[Any, Any], Any], status: Callable[[Any, Any], Any]) -> Any:
    """Serves InferenceService."""
    methods = {
        "Stream": grpc.stream_stream_rpc_method_handler(
            stream, request_deserializer=framing.parse, response_serializer=pb.StreamResponse.SerializeToString
        ),
        "Status": grpc.unary_unary_rpc_method_handler(
            status,
            request_deserializer=pb.StatusRequest.FromString,
            response_serializer=pb.StatusResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def open_stream(channel: Any, messages: Iterator[pb.StreamRequest | framing.StepParts]) -> Any:
    """Calls InferenceService.Stream; iterates over what the learner says."""
    call = channel.stream_stream(
        f"/{SERVICE}/Stream",
        request_serializer=framing.serialize,
        response_deserializer=pb.StreamResponse.FromString,
    )
    return call(messages)


def ask_status(address: str, seconds: float) -> pb.StatusResponse:
    """Calls InferenceService.Status of a learner. Raises LearnerLost if there is no answer in time."""
    with grpc.insecure_channel(address, options=client_options()) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusResponse.FromString,
        )
        try:
            answer: pb.StatusResponse = call(pb.StatusRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise LearnerLost(
                f"no learner answers at {address} ({error.code().name.lower()}: {error.details()})"
            ) from error
    return answer
