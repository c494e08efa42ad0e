"""One actor: joins a learner, does the job it is given, joins again when the stream or an environment breaks.

Knows no environment, and nothing of who else is there.
"""

import os
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import envs_server.pool
from envs_server.route import Route
from envs_server.session import ActorSession, Ending, MakePool
from envs_server.shares import expect_first_process
from envs_server.stepping import MakeEnv
from seedrl.config import ActorConfig
from seedrl.errors import EnvBroken, EnvFailed, LearnerLost, Refused
from seedrl.metrics import ActorMetrics
from seedrl.validation import check_actor
from seedrl.wire.memory import this_host
from seedrl.wire.messages import Hello

AT_ONCE = (Ending.again, Ending.redirected)  # the next session follows without a pause
FAILURE_SECONDS = 600.0  # failures of environments longer ago are forgotten


class Actor:
    """Actor("host:port", make_env).run() steps your own environments for a learner with env.id=own.

    `make_env` is called once for each, with the learner's env.options. Without it the learner says which environment it
    is. Settings are those of ActorConfig, by name: threads=4, security=SecurityConfig(…). Owned by the main thread,
    except `stop`, which any thread or signal handler may call.
    """

    def __init__(
        self,
        learner: str,
        make_env: MakeEnv | None = None,
        *,
        make_pool: MakePool | None = None,
        say: Callable[[str], None] = print,
        **settings: Any,
    ) -> None:
        expect_first_process()
        config = self._config = ActorConfig(learner=learner, **settings)
        check_actor(config)
        self._route = Route(config.learner, config.security)
        self._make_pool = make_pool or partial(envs_server.pool.make_pool, make_env=make_env)
        self._say = say
        self._name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.metrics = ActorMetrics()
        self._stopping = threading.Event()
        self._session: ActorSession | None = None
        self._instance = secrets.token_hex(8)
        self._epoch = 0
        self._env_failures: deque[float] = deque()  # the times of recent ones
        self._untold_failure = ""  # of the environments; the next Hello reports it
        self._have_stepped = False  # the environments have had their first steps

    def run(self) -> None:
        """Run until training is over or `stop` is called; raise what another attempt cannot mend."""
        self._warn_if_exposed()
        seen = time.monotonic()
        failures = 0
        while not self._stopping.is_set():
            route = self._route
            session = self._session = ActorSession(
                self._config, route.link, self._hello(), self._make_pool, self.metrics, is_home=route.is_home
            )
            ending, why = self._run(session)
            self.metrics.actor_connected = 0
            if ending is Ending.over:
                self._say(f"actor {self._name}: {why}")
                return
            if session.answered or ending is Ending.env_failed:
                seen = time.monotonic()
            if session.answered:
                failures = 0
            absent = time.monotonic() - seen
            if absent > self._config.patience:
                raise LearnerLost(f"no learner at {self._config.learner} for {absent:.0f} s; last: {why}")
            ending, why = self._turn(session, ending, why)
            if ending not in AT_ONCE and not self._stopping.is_set():
                if ending is not Ending.env_failed and failures == 0:
                    self._say(f"actor {self._name}: {why}; trying again for {self._config.patience - absent:.0f} s")
                failures += 1
                self.metrics.actor_failures += 1
                self._stopping.wait(random.uniform(0.5, 1.0) * min(2.0, 0.5 * 2 ** min(failures, 2)))

    def stop(self) -> None:
        """Leave the session and return from `run`."""
        self._stopping.set()
        if self._session is not None:
            self._session.cancel()

    def _hello(self) -> Hello:
        self._epoch += 1
        return Hello(self._name, this_host(), self._instance, self._epoch, self._untold_failure, self._route.redirects)

    def _turn(self, session: ActorSession, ending: Ending, why: str) -> tuple[Ending, str]:
        """Decide where the next session is. A redirect that cannot be followed is a failure."""
        route = self._route
        if session.answered:
            route.served()
        if ending is Ending.again:
            route.stay()
        elif ending is Ending.redirected:
            self.metrics.actor_redirects += 1
            if refusal := route.follow(session.redirected_to):
                return Ending.lost, refusal
            self._say(f"actor {self._name}: {why}")
            self._warn_if_exposed()
        else:
            route.go_home()
        return ending, why

    def _warn_if_exposed(self) -> None:
        link = self._route.link
        if link.is_exposed:
            self._say(f"actor {self._name}: the stream to {link.address} is not encrypted, as was allowed")

    def _run(self, session: "ActorSession") -> tuple[Ending, str]:
        """Tolerate a failure of the environments now and then: the next session makes new ones."""
        try:
            ending, why = session.run(self._stopping)
        except EnvFailed as error:
            self._have_stepped = self._have_stepped or session.has_stepped
            if not (self._have_stepped or session.is_overdue):
                words = f"{error}; the environments failed in their first steps: `seedrl check` examines them"
                raise _again(EnvBroken, words, error) from error
            self._count_failure(error)
            self._untold_failure = str(error)
            self._say(f"actor {self._name}: {error}; making new environments\n{error.traceback}".rstrip())
            return Ending.env_failed, str(error)
        except Refused as error:
            if self._route.is_home or session.answered:
                raise
            return Ending.lost, str(error)  # home may be better
        self._have_stepped = self._have_stepped or session.has_stepped
        if session.welcomed:
            self._untold_failure = ""
        if ending is Ending.superseded:
            # Another process has this instance, perhaps a copy of this one. If both kept it, they would end each
            # other's sessions for ever.
            self._instance = secrets.token_hex(8)
        return ending, why

    def _count_failure(self, error: EnvFailed) -> None:
        """Raise the failure if there were too many recently."""
        self.metrics.actor_env_failures += 1
        now, recent = time.monotonic(), self._env_failures
        recent.append(now)
        while recent[0] < now - FAILURE_SECONDS:
            recent.popleft()
        if len(recent) > self._config.max_env_failures:
            often = f"environments failed {len(recent)} times within {FAILURE_SECONDS / 60:.0f} minutes"
            raise _again(EnvFailed, f"{often}, max_env_failures allows no more; last: {error}", error)


def _again(kind: type[EnvFailed], words: str, error: EnvFailed) -> EnvFailed:
    """Return an error in other words, with the same traceback."""
    failure = kind(words)
    failure.traceback, failure.__cause__ = error.traceback, error
    return failure
