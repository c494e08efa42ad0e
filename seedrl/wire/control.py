"""ControlRequest and its results ⇄ bytes, and a control request in words. Knows nothing of what sessions do with it."""

import json
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from seedrl.errors import InvalidMessage
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.messages import ORDERS, Command, ControlRequest, MemberResult, Outcome
from seedrl.wire.text import decode_options, printable

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MAX_BYTES = 64 * 1024  # of a request
MAX_WORDS = 512  # characters of options that a log line shows
OUTCOMES = {Outcome.done: pb.MemberResult.OUTCOME_DONE, Outcome.refused: pb.MemberResult.OUTCOME_REFUSED}


def serialize_control_request(order: ControlRequest) -> bytes:
    request = pb.ControlRequest(
        actor=order.actor,
        temperature=order.temperature,
        epsilon=order.epsilon,
        command=order.command,  # type: ignore[arg-type]  # the numbers are those of the protocol
        options_json=json.dumps(order.options) if order.options else "",
    )
    if order.open is not None:
        request.open = order.open
    return request.SerializeToString()


def parse_control_request(data: bytes) -> ControlRequest:
    """Return the request. Raises InvalidMessage naming the field that is wrong."""
    if len(data) > MAX_BYTES:
        raise InvalidMessage(f"message: expected at most {MAX_BYTES} bytes, saw {len(data)}")
    try:
        request = pb.ControlRequest.FromString(data)
    except DecodeError as error:
        raise InvalidMessage("message: expected a ControlRequest, saw other bytes") from error
    temperature = request.temperature if request.HasField("temperature") else None
    epsilon = request.epsilon if request.HasField("epsilon") else None
    if temperature is not None and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidMessage(f"temperature: expected {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, saw {temperature}")
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise InvalidMessage(f"epsilon: expected 0 to 1, saw {epsilon}")
    command = int(request.command)
    if command not in (Command.UNSPECIFIED, *ORDERS.values()):
        raise InvalidMessage(f"command: expected one of {', '.join(ORDERS)}, saw {command}")
    options = decode_options("options_json", request.options_json) or None
    is_open = request.open if request.HasField("open") else None
    order = ControlRequest(request.actor, temperature, epsilon, Command(command), options, is_open)
    if order == ControlRequest(request.actor):
        raise InvalidMessage("message: expected at least one change, saw none")
    return order


def serialize_control_response(results: Iterable[MemberResult]) -> bytes:
    members = [
        pb.MemberResult(name=result.name, outcome=OUTCOMES[result.outcome], reason=result.reason) for result in results
    ]
    return pb.ControlResponse(members=members).SerializeToString()


def parse_control_response(data: bytes) -> list[MemberResult]:
    """Return what became of a request, for each session that it was about."""
    names = {number: outcome for outcome, number in OUTCOMES.items()}
    return [
        MemberResult(member.name, names.get(member.outcome, Outcome.refused), member.reason)
        for member in pb.ControlResponse.FromString(data).members
    ]


def describe_request(order: ControlRequest) -> str:
    """Return the request in words, for people."""
    names = {command: name for name, command in ORDERS.items()}
    wanted = {
        "temperature": order.temperature,
        "epsilon": order.epsilon,
        "options": printable(json.dumps(order.options), MAX_WORDS) if order.options else None,
    }
    words = [f"{name}={value}" for name, value in wanted.items() if value is not None]
    words += [names[order.command]] if order.command else []
    words += [] if order.open is None else ["open" if order.open else "take no new actors"]
    return ", ".join(words)
