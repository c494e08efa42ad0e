"""A rank that is left alone: `python -m tests.lost_rank die|hang`, once for each rank; rank 1 dies or hangs."""

import os
import sys
import time

import torch

from seedrl.errors import RankLost
from seedrl.ranks.group import Ranks
from seedrl.run.identity import identity


def main(fault: str) -> None:
    ranks = Ranks.join(identity("learner"), torch.device("cpu"), timeout=3.0)
    assert ranks.gather(["hello", ranks.identity.rank]) == [["hello", 0], ["hello", 1]]
    if ranks.identity.rank == 1:
        if fault == "hang":
            time.sleep(30)
        os._exit(0)
    began = time.monotonic()
    try:
        ranks.gather_rows([1.0])
    except RankLost as error:
        print(f"{error}; after {time.monotonic() - began:.1f} s", flush=True)
        os._exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
