"""A rank that is left alone: `python -m tests.lost_rank die|hang DIRECTORY`, once for each rank; rank 1 dies or hangs.

Both wait for each other's file in DIRECTORY before they join, so that the short timeout does not cover their imports.
"""

import os
import sys
import time
from pathlib import Path

import torch

from seedrl.errors import RankLost
from seedrl.ranks.group import Ranks
from seedrl.run.identity import identity
from tests.integration.waiting import eventually


def meet(directory: Path, rank: int) -> None:
    (directory / str(rank)).touch()
    eventually(lambda: all((directory / str(each)).exists() for each in range(2)))


def main(fault: str, directory: str) -> None:
    meet(Path(directory), identity("learner").rank)
    ranks = Ranks.join(identity("learner"), torch.device("cpu"), timeout=3.0)
    assert ranks.all_gather_object(["hello", ranks.identity.rank]) == [["hello", 0], ["hello", 1]]
    if ranks.identity.rank == 1:
        if fault == "hang":
            time.sleep(30)
        os._exit(0)
    began = time.monotonic()
    try:
        ranks.all_gather_numbers([1.0])
    except RankLost as error:
        print(f"{error}; after {time.monotonic() - began:.1f} s", flush=True)
        os._exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
