"""A healthy actor in a process of its own, so that an attacker in another one takes none of its time.

python -m tests.chaos.healthy HOST:PORT    prints its requests, sessions and wrong actions so far, and the milliseconds
                                           since the last answer, again and again
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
        requests, answered = 0, time.monotonic()
        while not actor.ended():
            if actor.requests != requests:
                requests, answered = actor.requests, time.monotonic()
            gap = int(1000 * (time.monotonic() - answered))
            print(requests, len(actor.pools), len(actor.wrong), gap, flush=True)
            time.sleep(PRINT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
