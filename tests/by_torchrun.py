"""The command line of torchrun, for tests that start ranks by hand."""

import sys


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """Return the command for ranks on one machine, at any free port, without restarts."""
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
