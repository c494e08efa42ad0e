"""Finds out whether an environment draws itself, in a separate process: some end theirs where they cannot."""

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection

from envs_server.pool import make_pool
from seedrl.wire.messages import Welcome

RENDERED = {"render_mode": "rgb_array"}  # the option that Gymnasium and envpool know
TRIAL_SECONDS = 60.0
END_SECONDS = 2.0


def rendered(job: Welcome) -> Welcome:
    """Return the job with environments that draw themselves."""
    return job._replace(options={**job.options, **RENDERED}, processes=False)


def why_not_drawn(job: Welcome) -> str:
    """Return why `rendered(job)` gives no pictures; empty if it does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(theirs, job), name="drawing", daemon=True)
    process.start()
    theirs.close()
    try:
        words = str(ours.recv()) if ours.poll(TRIAL_SECONDS) else f"it took more than {TRIAL_SECONDS:.0f} s"
    except EOFError:
        process.join(END_SECONDS)
        words = f"the process that tried ended with code {process.exitcode}"
    process.kill()
    process.join()
    return words


def _try(pipe: Connection, job: Welcome) -> None:
    try:
        pool = make_pool(rendered(job), threads=1)
        pool.recv()
        os.chdir(tempfile.gettempdir())  # other files that it writes belong there, such as MuJoCo's log
        frame = pool.render() if hasattr(pool, "render") else None
        pipe.send("" if frame is not None else "it gives no picture")
    except Exception as error:
        pipe.send((str(error) or repr(error)).splitlines()[0])
