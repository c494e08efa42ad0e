"""A healthy actor in a process of its own, so that an attacker in another one takes none of its time.

python -m tests.chaos.healthy HOST:PORT    prints its requests, sessions and wrong actions so far, again and again
"""

import sys
import time

from seedrl.config import ActorConfig
from tests.integration.support import RunningActor, SignedPool, ended_together

PRINT_SECONDS = 0.05


def main(address: str) -> None:
    with ended_together() as started:
        actor = RunningActor(ActorConfig(learner=address, name="healthy"), SignedPool)
        started.append(actor)
        while not actor.ended():
            print(actor.requests, len(actor.pools), len(actor.wrong), flush=True)
            time.sleep(PRINT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
