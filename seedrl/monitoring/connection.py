"""Finds a learner by its address or its run directory, and asks for its status. Knows nothing of how it is shown."""

from pathlib import Path

from seedrl.config import ControlConfig, DoctorConfig, StatusConfig
from seedrl.errors import ConfigError, LearnerLost, RunDirectoryError
from seedrl.run.context import ContextFile, State
from seedrl.status import Status
from seedrl.wire.channel import Link, ask_status

ANSWER_SECONDS = 5.0


def link_to(config: StatusConfig | DoctorConfig | ControlConfig) -> Link:
    """Return the link to a learner, found by its address, by its run directory, or as the newest below runs/."""
    return Link(config.learner or _address_in(run_directory_of(config.run)), config.security)


def learner_status(config: StatusConfig | DoctorConfig) -> Status:
    """Return the status of a learner. If it does not answer, the error says how its run ended."""
    link = link_to(config)
    try:
        return ask_status(link, ANSWER_SECONDS)
    except LearnerLost as error:
        if config.learner:
            raise
        raise LearnerLost(f"{error}; {_outcome(run_directory_of(config.run))}") from error


def run_directory_of(run: str) -> Path:
    """Return the directory that `run=` names, or the newest below runs/ if it is empty."""
    if run:
        return Path(run)
    contexts = sorted(Path("runs").glob("*/*/context.json"), key=lambda path: path.stat().st_mtime)
    if not contexts:
        raise ConfigError("there is no run below runs/ here; give learner=HOST:PORT or run=DIR")
    return contexts[-1].parent


def _outcome(run: Path) -> str:
    """Describe how a run whose learner does not answer has ended."""
    context = ContextFile(run).read_or_new()
    if context.state in (State.DONE, State.FAILED):
        return f"{run} has ended, {context.state.name.lower()}: {context.reason}"
    return f"{run} did not end cleanly: its learner hangs, or was killed"


def _address_in(run: Path) -> str:
    """Return where the learner of a run is, or was last."""
    try:
        return ContextFile(run).read().address
    except RunDirectoryError as error:
        raise ConfigError(
            f"run={run} does not contain the address of its learner ({error}); give learner=HOST:PORT"
        ) from error
