"""`seedrl control`: commands to the actors of a running learner. Knows nothing of how actors carry them out."""

from seedrl.config import ControlConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.connection import ANSWER_SECONDS, link_to
from seedrl.wire.channel import ask_control
from seedrl.wire.control import describe_request
from seedrl.wire.messages import ORDERS, Command, ControlRequest

OPEN = "open"  # an order to the learner itself


def run_control(config: ControlConfig) -> None:
    order = order_of(config)
    actors = ask_control(link_to(config), order, ANSWER_SECONDS)
    told = f"{actors} {'actor' if actors == 1 else 'actors'}"
    print(f"told {'the learner' if order == ControlRequest(open=True) else told}: {describe_request(order)}")


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
