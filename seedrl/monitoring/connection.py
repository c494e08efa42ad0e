"""Finds a learner by its address or its run directory, and asks for its status. Knows nothing of how it is shown."""

from pathlib import Path

from seedrl.config import ControlConfig, DoctorConfig, StatusConfig
from seedrl.errors import ConfigError, LearnerLost, RunDirectoryError
from seedrl.run.context import ENDED, Context, ContextFile
from seedrl.run.finding import find_run
from seedrl.status import Status
from seedrl.wire.address import check_address
from seedrl.wire.channel import Link, ask_status

ANSWER_SECONDS = 5.0


def link_to(config: StatusConfig | DoctorConfig | ControlConfig) -> Link:
    """Return the link to a learner, found by its address, by its run directory, or as that of the newest run.

    Raise RunEnded for a run that is over: another learner may have its address by now.
    """
    if config.learner:
        check_address("learner", config.learner)
        return Link(config.learner, config.security)
    run = find_run(config.run)
    context = context_of(run)
    if context.state in ENDED:
        raise RunEnded(run, context)
    return Link(context.address, config.security)


def learner_status(config: StatusConfig | DoctorConfig) -> Status:
    """Return the status of a learner. If it does not answer, the error says what is known of its run."""
    link = link_to(config)
    try:
        return ask_status(link, ANSWER_SECONDS)
    except LearnerLost as error:
        if config.learner:
            raise
        run = find_run(config.run)
        raise LearnerLost(f"{run} did not end cleanly: its learner hangs, or was killed ({error})") from error


class RunEnded(LearnerLost):
    """The run is over, so that there is no learner to ask."""

    def __init__(self, run: Path, context: Context) -> None:
        super().__init__(f"{run} has ended, {context.state.name.lower()}: {context.reason}")


def context_of(run: Path) -> Context:
    """Return the run context. Raises ConfigError if there is none."""
    try:
        return ContextFile(run).read()
    except RunDirectoryError as error:
        raise ConfigError(
            f"run={run} does not contain the address of its learner ({error}); give learner=HOST:PORT"
        ) from error
