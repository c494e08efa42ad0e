"""Every error that seedrl raises on purpose. Knows nothing of gRPC: `wire.codes` maps these to status codes.

    SeedrlError
    ├── ConfigError            the settings cannot work; change them            exit 2
    ├── RunDirectoryError      the run directory does not fit or is damaged     exit 3
    ├── LearnerLost            the actor gave up on reaching a learner          exit 4
    ├── EnvFailed              the environment raised or stopped answering      exit 5
    │   └── EnvBroken          it did so in its first steps; no retry helps     exit 10
    ├── Refused                a peer's message was refused; ends its session   exit 6
    │   ├── Unauthenticated    the token or certificate is missing or not accepted
    │   ├── InvalidMessage     the message is malformed
    │   ├── Mismatch           the protocol version or the spaces differ
    │   ├── NotGranted         the environment is outside the session's lease
    │   ├── TooLate            no message arrived in time
    │   ├── Superseded         another session of the same actor is newer
    │   └── NoCapacity         the learner has too few free slots
    ├── ThreadDied             a thread of the learner died                     exit 7
    ├── Diverged               too many losses or gradients were not finite     exit 8
    ├── RankLost               another rank of the learner died or hangs        exit 9
    └── JobFailed              a job submitted from Python failed               its own exit code

A message says what happened, what was seen, and what to change.
"""


class SeedrlError(Exception):
    exit_code = 1
    traceback = ""  # of the user's own code, if that has failed; people see it below the message


class ConfigError(SeedrlError):
    exit_code = 2


class RunDirectoryError(SeedrlError):
    exit_code = 3


class LearnerLost(SeedrlError):
    exit_code = 4


class EnvFailed(SeedrlError):
    exit_code = 5


class EnvBroken(EnvFailed):
    exit_code = 10


class Refused(SeedrlError):
    exit_code = 6
    reason = "internal"  # the label in metrics


class Unauthenticated(Refused):
    reason = "unauthenticated"


class InvalidMessage(Refused):
    reason = "invalid_message"


class Mismatch(Refused):
    reason = "mismatch"


class NotGranted(Refused):
    reason = "not_granted"


class TooLate(Refused):
    reason = "too_late"


class Superseded(Refused):
    reason = "superseded"


class NoCapacity(Refused):
    reason = "no_capacity"


class ThreadDied(SeedrlError):
    exit_code = 7


class Diverged(SeedrlError):
    exit_code = 8


class RankLost(SeedrlError):
    exit_code = 9


class JobFailed(SeedrlError):
    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


def require(holds: bool, otherwise: str) -> None:
    """Raise ConfigError with this message unless the condition holds."""
    if not holds:
        raise ConfigError(otherwise)
