"""The actor process: signals and exit codes around an Actor."""

import signal
import threading
from typing import Any

from envs_server.actor import Actor
from seedrl.config import ActorConfig


def run_actor(config: ActorConfig) -> None:
    """`seedrl actor`: returns when training is over or on SIGINT or SIGTERM."""
    actor = Actor(config)

    def handle(number: int, _: Any) -> None:
        # In a thread: the one interrupted may hold the very locks that this takes.
        threading.Thread(target=actor.stop, name="stop").start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    actor.run()
