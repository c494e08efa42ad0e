"""`seedrl control`: people steer the actors of a running learner. Knows nothing of how actors obey."""

from seedrl.config import ControlConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.overview import link_to
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.channel import ask_control
from seedrl.wire.codec import ORDERS, Order, encode_order, words_of

ANSWER_SECONDS = 5.0


def run_control(config: ControlConfig) -> None:
    order = order_of(config)
    answer = ask_control(link_to(config), encode_order(order), ANSWER_SECONDS)
    print(f"told {answer.actors} {'actor' if answer.actors == 1 else 'actors'}: {words_of(order)}")


def order_of(config: ControlConfig) -> Order:
    """Environments with other options have to be made anew, so that is a reset as well."""
    unknown = [word for word in config.do if word not in ORDERS]
    if unknown or len(config.do) > 1:
        raise ConfigError(f"seedrl control {' '.join(config.do)}: expected one of {', '.join(ORDERS)}")
    command = ORDERS[config.do[0]] if config.do else pb.Control.COMMAND_UNSPECIFIED
    if config.options and not command:
        command = pb.Control.COMMAND_RESET
    order = Order(config.actor, config.temperature, config.epsilon, command, config.options or None)
    if order == Order(config.actor):
        raise ConfigError(f"nothing to do: give temperature=, epsilon=, options=, or one of {', '.join(ORDERS)}")
    return order
