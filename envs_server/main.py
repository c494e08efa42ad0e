"""The actor process: signals and exit codes around an Actor."""

import signal
from typing import Any

from envs_server.actor import Actor
from seedrl.config import ActorConfig


def run_actor(config: ActorConfig) -> None:
    """`seedrl actor`: returns when training is over or on SIGINT or SIGTERM."""
    actor = Actor(config)

    def handle(number: int, _: Any) -> None:
        actor.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    actor.run()
