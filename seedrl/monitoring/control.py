"""`seedrl control`: orders to the actors of a running learner. Knows nothing of how actors carry them out."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from seedrl.config import ControlConfig
from seedrl.errors import ConfigError, LearnerLost
from seedrl.monitoring.connection import ANSWER_SECONDS
from seedrl.monitoring.members import Endpoint, Gone, endpoints_of, serving
from seedrl.wire.channel import ask_control
from seedrl.wire.control import describe_request
from seedrl.wire.messages import ORDERS, Command, ControlRequest, MemberResult, Outcome

OPEN = "open"  # an order to the learner itself
SHOWN = 20  # members that are named although all is well


def run_control(config: ControlConfig) -> None:
    """Print what became of an order, by member. Raises ConfigError if some have not done it."""
    results = tell(config)
    if config.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        for line in shown(order_of(config), results):
            print(line)
    left = [result for result in results if result.outcome is not Outcome.done]
    if left:
        raise ConfigError(f"{len(left)} of {len(results)} have not done it; {left[0].name}: {left[0].reason}")


def tell(config: ControlConfig) -> list[MemberResult]:
    """Give an order to the members that the settings name; return what became of it, by member."""
    order, endpoints = order_of(config), endpoints_of(config)
    if order.open is False and len(endpoints) > 1:
        raise ConfigError("seedrl control move empties one endpoint, and there are several; give rank=N, or actor=NAME")
    if order.actor:
        found = serving(order.actor, endpoints)
        if isinstance(found, Gone):
            return [MemberResult(found.name, Outcome.gone, found.words, found.rank)]
        endpoints = found
    is_only = len(endpoints) == 1
    return [result for endpoint in endpoints for result in _tell(order, endpoint, is_only)]


def _tell(order: ControlRequest, endpoint: Endpoint, is_only: bool) -> list[MemberResult]:
    """Ask one endpoint. If it does not answer, its members are gone, unless no other one was asked."""
    try:
        results = ask_control(endpoint.link, order, ANSWER_SECONDS)
    except LearnerLost as error:
        if is_only:
            raise
        names = [member.name for member in endpoint.context.members.values() if member.streams_to]
        results = [MemberResult(name, Outcome.gone, str(error)) for name in names or ["its learner"]]
    return [result._replace(rank=endpoint.rank) for result in results]


def shown(order: ControlRequest, results: Sequence[MemberResult]) -> Iterator[str]:
    """Yield the result in lines: how many were told, and each member if there are few, or if it has not done it."""
    counts = Counter(result.outcome for result in results)
    told = f"{counts[Outcome.done]} {'actor' if counts[Outcome.done] == 1 else 'actors'}"
    others = "".join(f", {counts[each]} {each}" for each in (Outcome.refused, Outcome.gone) if counts[each])
    is_of_learner = order == ControlRequest(open=True)
    yield f"told {'the learner' if is_of_learner else told}{others}: {describe_request(order)}"
    several = len({result.rank for result in results}) > 1
    for result in () if is_of_learner else results:
        if result.outcome is not Outcome.done or len(results) <= SHOWN:
            rank = f" of rank {result.rank}" if several else ""
            yield f"  {result.name}{rank}: {result.outcome}{'; ' if result.reason else ''}{result.reason}"


def order_of(config: ControlConfig) -> ControlRequest:
    """Return the request. Environments with other options have to be created again, so that is a reset as well."""
    known = (*ORDERS, OPEN)
    unknown = [word for word in config.do if word not in known]
    if unknown or len(config.do) > 1:
        raise ConfigError(f"seedrl control {' '.join(config.do)}: expected one of {', '.join(known)}")
    word = config.do[0] if config.do else ""
    if word == OPEN and config.actor:
        raise ConfigError(f"seedrl control open actor={config.actor}: it is the learner that is open; leave actor= out")
    command = ORDERS.get(word, Command.UNSPECIFIED)
    if config.options and not command:
        command = Command.RESET
    order = ControlRequest(
        config.actor, config.temperature, config.epsilon, command, config.options or None, _is_to_open(word, config)
    )
    if order == ControlRequest(config.actor):
        raise ConfigError(f"nothing to do: give temperature=, epsilon=, options=, or one of {', '.join(known)}")
    return order


def _is_to_open(word: str, config: ControlConfig) -> bool | None:
    """Return whether the learner accepts new actors from now on: not if all of its actors have to move."""
    if word == OPEN:
        return True
    return False if ORDERS.get(word) == Command.REDIRECT and not config.actor else None
