"""The ranks of a learner, started and restarted by torchrun, the launcher of torch.distributed.

    python -m seedrl.launching.torchrun RANKS RESTARTS ERROR_FILES learner's settings …

is `torchrun --standalone --nproc-per-node=RANKS --max-restarts=RESTARTS -m seedrl learner …`, except that its exit
code is that of the first rank that failed and that it prints no summary of its own. A rank that fails by itself writes
an error file, as torchrun asks of its processes. torchrun would restart it; `seedrl run` looks for exit codes that
would only come again. Imports torch only where torchrun runs.
"""

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # names the file in which torchrun expects the reason of a failure
# Ranks meet in a new store after every restart: in one that outlives them they would find the addresses of dead ranks
# (https://github.com/pytorch/pytorch/issues/135712).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENDING_SECONDS = 20  # from asking the ranks to end to killing them


def is_under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment


def write_error_file(words: str, code: int, environment: Mapping[str, str] = os.environ) -> None:
    """Write why this process is about to end, if torchrun has started it."""
    if ERROR_FILE_VARIABLE not in environment:
        return
    about = {"errorCode": code, "timestamp": str(int(time.time()))}
    content = {"message": {"message": words, "errorCode": code, "extraInfo": about}}
    with contextlib.suppress(OSError):
        Path(environment[ERROR_FILE_VARIABLE]).write_text(json.dumps(content))


def failed_codes(error_files: Path) -> set[int]:
    """Return the exit codes of all ranks that have failed by themselves, in whichever attempt."""
    return _codes(error_files.glob("*/attempt_*/*/error.json"))


def failed_codes_of_newest_attempt(error_files: Path) -> set[int]:
    """Return the exit codes of the ranks that have failed by themselves since torchrun last started them."""
    attempts = sorted(error_files.glob("*/attempt_*"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return _codes(attempts[-1].glob("*/error.json")) if attempts else set()


def _codes(files: Iterable[Path]) -> set[int]:
    codes = set()
    for path in files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be half written
            codes.add(int(json.loads(path.read_text())["message"]["errorCode"]))
    return codes


def run(ranks: int, restarts: int, error_files: Path, settings: Sequence[str]) -> None:
    """Run the ranks; return when all have ended cleanly."""
    os.environ.update(FRESH_STORE)
    os.environ.setdefault("LOGLEVEL", "ERROR")  # torchrun logs which rank has failed, and not every signal
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        run_id=uuid.uuid4().hex,
        role="learner",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=str(error_files)),
        shutdown_timeout=ENDING_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "seedrl", "learner", *settings)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        raise SystemExit(code if code >= 0 else 128 - code) from None  # negative: ended by a signal
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
