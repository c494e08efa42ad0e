"""Errors ⇄ gRPC status codes. Knows nothing of calls."""

import grpc

from seedrl.errors import (
    InvalidMessage,
    Mismatch,
    NoCapacity,
    NotGranted,
    Refused,
    Superseded,
    TooLate,
    Unauthenticated,
)

_CODES: dict[type[Refused], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    InvalidMessage: grpc.StatusCode.INVALID_ARGUMENT,
    Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    NotGranted: grpc.StatusCode.PERMISSION_DENIED,
    TooLate: grpc.StatusCode.DEADLINE_EXCEEDED,
    Superseded: grpc.StatusCode.ABORTED,
    NoCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

# Failures that may not happen again. All others would happen again in the same way.
_WORTH_RETRYING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
)


def code_of(error: Refused) -> grpc.StatusCode:
    return _CODES[type(error)]


def is_worth_retrying(code: grpc.StatusCode) -> bool:
    return code in _WORTH_RETRYING
