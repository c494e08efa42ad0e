"""Environments in threads and in processes of their own. Knows nothing of what they are or why they step."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from envs_server.games import Games
from envs_server.stepping import Envs, MakeEnv, Stepped
from seedrl.errors import ConfigError, EnvFailed, SeedrlError
from seedrl.specs import Arrays, EnvSpec
from seedrl.tracebacks import failed

PREFIX = "environments "  # of names of processes and threads
START_SECONDS = 60.0  # for a process to make its environments
END_SECONDS = 2.0


AnyEnvs = Envs | Games


def made_of(make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int], players: int) -> AnyEnvs:
    """Make one environment for each seed, or one simulation with several players."""
    return Envs(make_env, options, seeds) if players == 1 else Games(make_env, options, seeds, players)


class Share:
    """Some environments and the thread that makes, steps and closes them; answers are put into a queue.

    The thread is a daemon: an environment that hangs must not keep the process from ending.
    """

    def __init__(self, name: str, make: Callable[[], "AnyEnvs | RemoteEnvs"], answers: SimpleQueue[Any]) -> None:
        self._make = make
        self._answers = answers  # of (share, answer or exception)
        self._questions: SimpleQueue[Callable[[Any], Any] | None] = SimpleQueue()
        self._envs: AnyEnvs | RemoteEnvs | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Any], Any]) -> None:
        """Have a question answered for the environments; the answer is put into the queue."""
        self._questions.put(question)

    def _work(self) -> None:
        try:
            self._envs = self._make()
            while (question := self._questions.get()) is not None:
                self._answers.put((self, question(self._envs)))
        except Exception as error:
            self._answers.put((self, failed(EnvFailed, "the environment raised", error)))
        finally:
            if self._envs is not None:
                self._envs.close()

    def end(self) -> None:
        """Ask the thread to end once it has stepped."""
        self._questions.put(None)

    def join(self, seconds: float) -> bool:
        """Return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Kill the process, if there is one."""
        if isinstance(self._envs, RemoteEnvs):
            self._envs.kill()


class Failed(NamedTuple):
    """The message of a process that has failed."""

    is_setting: bool  # a setting is wrong; otherwise the environment failed
    words: str
    traceback: str

    def error(self) -> SeedrlError:
        """Return the error that the process has met."""
        error = (ConfigError if self.is_setting else EnvFailed)(self.words)
        error.traceback = self.traceback
        error.add_note(self.traceback)  # for programs that end with it: Python shows no traceback of another process
        return error


class RemoteEnvs:
    """Envs in a process of its own, which ends with this one. Owned by one thread, except `kill`."""

    def __init__(
        self, name: str, make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int], players: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")  # not forked: this process has threads of gRPC's
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, make_env, options, list(seeds), players)
        self._process = context.Process(target=serve, args=arguments, name=name, daemon=True)
        try:
            _start(self._process)
            theirs.close()
            if not self._pipe.poll(START_SECONDS):
                raise EnvFailed(f"the process of {name} could not make them within {START_SECONDS:.0f} s")
            self.spec: EnvSpec = self._answer()
        except BaseException:
            self.close()
            raise

    def first(self) -> Stepped:
        return self._ask("first")

    def step(self, action: Arrays) -> Stepped:
        return self._ask("step", action)

    def _ask(self, method: str, *arguments: Any) -> Stepped:
        with contextlib.suppress(BrokenPipeError):  # that it has ended shows in what it answers
            self._pipe.send((method, arguments))
        stepped: Stepped = self._answer()
        return stepped

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(END_SECONDS)
            raise EnvFailed(f"the process of {self._process.name} ended with code {self._process.exitcode}") from None
        if isinstance(answer, Failed):
            raise answer.error()
        return answer

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    def close(self) -> None:
        self._pipe.close()
        if self._process.pid is None:  # never started
            return
        self._process.join(END_SECONDS)
        self._process.kill()
        self._process.join()


def _start(process: Any) -> None:
    try:
        process.start()
    except OSError:
        raise
    except Exception as error:  # pickle's, of many kinds
        raise ConfigError(
            f"env.processes=true starts another Python process, which has to find the constructor by its name: "
            f"let it be a function or class at the top of a module, not a lambda or a local one ({error})"
        ) from error


def expect_first_process() -> None:
    """Refuse to run in a process that was started for environments and executes its parent's program again."""
    if multiprocessing.current_process().name.startswith(PREFIX):
        raise ConfigError(
            "env.processes=true runs this file once more in every process: put Actor(…).run() below "
            'if __name__ == "__main__":'
        )


def serve(
    pipe: Connection, make_env: MakeEnv | str, options: dict[str, Any], seeds: list[int], players: int = 1
) -> None:
    """The process's side, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the actor, which closes the pipe
    threading.Thread(target=_end_with_the_parent, name="parent", daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _serve(pipe, made_of(make_env, options, seeds, players))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            failure = failed(EnvFailed, "the environment raised", error)
            pipe.send(Failed(isinstance(failure, ConfigError), str(failure), failure.traceback))


def _serve(pipe: Connection, envs: AnyEnvs) -> None:
    try:
        pipe.send(envs.spec)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(envs, method)(*arguments))
    finally:
        envs.close()


def _end_with_the_parent() -> None:
    """End with the parent, even if an environment hangs and the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
