"""A rank that says it has another device than it has: `python -m tests.unlike_ranks KIND`, once for each rank.

It prints why ranks do not fit together, and ends with that error's exit code.
"""

import os
import sys

import torch

import seedrl.ranks.group
from seedrl.errors import ConfigError
from seedrl.ranks.devices import RankDevice
from seedrl.ranks.group import Ranks
from seedrl.run.identity import identity
from tests.integration.waiting import DEADLINE


def main(kind: str) -> None:
    own = identity("learner")
    seedrl.ranks.group.device_of = lambda identity, device: RankDevice(kind, f"host-{own.rank}")
    try:
        Ranks.join(own, torch.device("cpu"), timeout=DEADLINE)
    except ConfigError as error:
        print(error, flush=True)
        os._exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
