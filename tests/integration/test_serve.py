"""`seedrl serve`: the same stream without learning, for our actors and for anybody who has the protocol."""

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from seedrl.config import SecurityConfig, ServeConfig
from seedrl.errors import ConfigError
from seedrl.roles.serve import Serving
from seedrl.wire.channel import Link, ask_status
from seedrl.wire.codec import decode_act
from tests.integration.processes import Commands
from tests.integration.support import SPEC, InThread, RawActor, ended_together
from tests.integration.test_processes import SMALL
from tests.integration.trained import favouring, make_run, save
from tests.integration.waiting import DEADLINE, eventually, free_address, is_listening

ROOT = Path(__file__).parents[2]


class Served(InThread):
    """A policy that is served in a thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.said: list[str] = []
        self.serving = Serving(config, self.said.append)
        self.address = config.listen
        super().__init__(self.serving.run)

    def ask_to_stop(self) -> None:
        self.serving.deployment.stop.ask("interrupted", "the test is over")

    @property
    def version(self) -> int:
        return self.serving.deployment.policy.version


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """serve(run, **fields of ServeConfig)"""
    started: list[Served]
    with ended_together() as started:

        def start(run: Path, **settings: Any) -> Served:
            served = Served(ServeConfig(run=str(run), listen=free_address(), threads=1, **settings))
            started.append(served)
            eventually(lambda: served.ended() or is_listening(served.address))
            return served

        yield start


def actions_of(address: str, steps: int = 1) -> list[int]:
    """Return what four environments are told to do, so many times."""
    found: list[int] = []
    with RawActor(address) as raw:
        raw.join()
        for number in range(steps):
            raw.step(number + 1, **({} if number == 0 else {"flags": np.zeros(4, np.uint8)}))
            found += decode_act(raw.receive().act, SPEC, 4).tolist()
    return found


def test_serve_answers_with_the_likeliest_action_and_trains_nothing(serve: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", favouring(11, by=0.1))
    served = serve(run)
    assert actions_of(served.address, steps=20) == [11] * 80
    metrics = served.serving.deployment.metrics
    assert (metrics.eval_steps, metrics.env_steps, metrics.unrolls_made) == (19 * 4, 0, 0)
    assert [thread.name for thread in threading.enumerate() if thread.name == "learner"] == []
    status = ask_status(Link(served.address, SecurityConfig()), seconds=10)
    assert (status.state, status.env, status.run_dir) == ("running", "Signed-v0", str(run))


def test_serve_that_is_not_greedy_samples(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11, by=0.1)), greedy=False)
    assert len(set(actions_of(served.address, steps=20))) > 10


def test_serve_takes_up_newer_weights_when_asked_and_a_session_goes_on(serve: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", favouring(3, updates=1))
    served = serve(run)
    with RawActor(served.address) as raw:
        raw.join()
        raw.step(1)
        assert decode_act(raw.receive().act, SPEC, 4).tolist() == [3] * 4
        save(run, favouring(5, updates=2))
        served.serving.reload()
        eventually(lambda: served.version == 2)
        raw.step(2, flags=np.zeros(4, np.uint8))
        assert decode_act(raw.receive().act, SPEC, 4).tolist() == [5] * 4
    assert any("policy 2 from now on" in words for words in served.said)


def test_serve_that_watches_takes_up_what_is_newer_and_goes_on_with_the_last_if_it_does_not_fit(
    serve: Any, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", favouring(3, updates=1))
    served = serve(run, watch=True)
    save(run, favouring(5, updates=2))
    eventually(lambda: served.version == 2)
    other = favouring(9, updates=3)
    other.state["spec"]["action"][""]["sizes"] = [4]
    save(run, other)
    eventually(lambda: any("other spaces" in words for words in served.said))
    assert actions_of(served.address) == [5] * 4
    assert served.version == 2


def test_serve_of_the_best_checkpoint_or_of_a_named_one(serve: Any, tmp_path: Path) -> None:
    checkpoints = [favouring(1, updates=1, score=5.0), favouring(2, updates=2, score=9.0), favouring(3, updates=3)]
    run = make_run(tmp_path / "run", *checkpoints)
    assert actions_of(serve(run, checkpoint="best").address) == [2] * 4
    assert actions_of(serve(run, checkpoint="000000000100").address) == [1] * 4
    assert actions_of(serve(run).address) == [3] * 4
    with pytest.raises(ConfigError, match="newest, best, 000000000100"):
        serve(run, checkpoint="oldest")


def test_serve_beyond_this_machine_takes_tls_and_a_token(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", favouring(3))
    with pytest.raises(ConfigError, match=r"listen=0\.0\.0\.0:1 reaches beyond this machine without TLS"):
        Serving(ServeConfig(run=str(run), listen="0.0.0.0:1"), print)


def test_serve_with_a_token_refuses_strangers(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDRL_TOKEN", "a-token-of-the-tests-0123456789")
    served = serve(make_run(tmp_path / "run", favouring(3)))
    with RawActor(served.address) as raw:
        raw.hello()
        assert raw.status()[0] is grpc.StatusCode.UNAUTHENTICATED


# Clients that have nothing but the protocol.


def client_of_the_documentation(directory: Path) -> Path:
    """The program in docs/serving.md, word for word, beside code that was generated from the proto alone."""
    (program,) = re.findall(r"^```python\n(# client\.py.*?)^```", (ROOT / "docs/serving.md").read_text(), re.M | re.S)
    assert len(program.strip().splitlines()) <= 40
    assert "import seedrl" not in program
    shutil.copy(ROOT / "proto/seedrl/v1/inference.proto", directory)
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=."]
    subprocess.run([*command, "inference.proto"], cwd=directory, check=True)
    (directory / "seedrl.py").write_text("raise ImportError('a foreign client has no seedrl')\n")
    (directory / "client.py").write_text(program)
    return directory / "client.py"


@pytest.mark.long
def test_serve_client_of_the_documentation_plays_an_episode_with_a_trained_policy(
    commands: Commands, tmp_path: Path
) -> None:
    run = commands.directory / "run"
    code, _, err = commands.run("run", "env=cartpole", f"run_dir={run}", *SMALL, "stop.env_steps=2000")
    assert code == 0, err
    address = free_address()
    serving = commands.start("serve", f"run={run}", f"listen={address}", "envs=1", "threads=1")
    eventually(lambda: is_listening(address) or not serving.is_running)
    client = client_of_the_documentation(tmp_path)
    done = subprocess.run(
        [sys.executable, client.name, address], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr + serving.err
    found = re.fullmatch(r"return (\d+) in (\d+) steps\n", done.stdout)
    assert found, done.stdout
    assert found[1] == found[2]  # CartPole's reward is 1 for every step
    serving.signal(signal.SIGHUP)
    serving.says("from now on")
    serving.signal(signal.SIGTERM)
    assert serving.wait() == 0
    assert "client joined with 1 environments" in serving.out
