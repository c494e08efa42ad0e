"""`seedrl serve websocket=…`: clients with OpenPI's messages share batches and have a recurrent state each."""

import contextlib
import re
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from seedrl.config import LearnerConfig, SecurityConfig, ServeConfig
from seedrl.errors import ConfigError
from seedrl.roles.serve import Serving
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput
from seedrl.wire.channel import Link, ask_status
from seedrl.wire.packed import pack, unpack
from tests.certificates import TOKEN, Certificates
from tests.integration.support import NUM_ACTIONS, SPEC, InThread, ended_together, right_action
from tests.integration.trained import checkpoint_of, favouring, make_run
from tests.integration.waiting import eventually, free_address, is_listening


class Remembering(nn.Module):
    """Its action is the number of rows since the episode began: only a state kept per client can tell."""

    core_size = 1

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        logits = []
        for reset in inputs.reset:
            core_state = torch.where(reset[:, None], torch.zeros_like(core_state), core_state)
            logits.append(nn.functional.one_hot(core_state[:, 0].long() % NUM_ACTIONS, NUM_ACTIONS).float())
            core_state = core_state + 1
        return ModelOutput(torch.stack(logits), inputs.reward), core_state


class Client:
    """A client as OpenPI's is, in the plainest way."""

    def __init__(self, url: str, **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(connect(url, compression=None, **options))
        self.metadata = unpack(self.socket.recv())

    def infer(self, observation: Any, **others: Any) -> dict[Any, Any]:
        self.socket.send(pack({"observation": observation, **others}))
        return unpack(self.socket.recv())

    def action(self, observation: Any, **others: Any) -> int:
        return int(self.infer(observation, **others)["actions"][0])

    def close(self) -> None:
        self._stack.close()


class Served(InThread):
    def __init__(self, config: ServeConfig) -> None:
        self.said: list[str] = []
        self.serving = Serving(config, self.said.append)
        self.config = config
        super().__init__(self.serving.run)

    def ask_to_stop(self) -> None:
        self.serving.deployment.stop.ask("interrupted", "the test is over")

    @property
    def url(self) -> str:
        return f"ws://{self.config.websocket}"


@pytest.fixture
def serve() -> Iterator[Any]:
    """serve(run, **fields of ServeConfig)"""
    started: list[Served]
    with ended_together() as started:

        def start(run: Path, **settings: Any) -> Served:
            addresses = {"listen": free_address(), "websocket": free_address()}
            served = Served(ServeConfig(run=str(run), threads=1, **{**addresses, **settings}))
            started.append(served)
            eventually(lambda: served.ended() or is_listening(served.config.websocket))
            return served

        yield start


def oracle_run(path: Path) -> Path:
    def change(config: LearnerConfig) -> None:
        config.model.name = "tests.integration.support:OracleModel"

    tensors = {"model/value.weight": torch.zeros(1, 1), "model/value.bias": torch.zeros(1)}
    return make_run(path, checkpoint_of(tensors, SPEC, 1), change=change)


def remembering_run(path: Path) -> Path:
    def change(config: LearnerConfig) -> None:
        config.model.name = f"{__name__}:Remembering"

    return make_run(path, checkpoint_of({"model/unused": torch.zeros(1)}, SPEC, 1), change=change)


def test_clients_get_their_own_answers_out_of_shared_batches(serve: Any, tmp_path: Path) -> None:
    """The batcher waits for all of them, so every batch has rows of several clients."""
    served = serve(oracle_run(tmp_path / "run"))
    batcher = served.serving.deployment.inference.batcher
    batcher._min_rows, batcher._max_wait = 4, 60.0
    wrong: list[str] = []

    def play(number: int) -> None:
        with contextlib.closing(Client(served.url)) as client:
            for row in range(10):
                observation = np.float32([number, row, 0])
                if (chosen := client.action(observation)) != right_action(observation):
                    wrong.append(f"{chosen} for {observation}")

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert served.serving.deployment.metrics.eval_steps == 4 * 9  # the first row of an episode is no step
    assert served.serving.deployment.metrics.batches == 10


def test_recurrent_state_is_kept_per_client_until_it_resets(serve: Any, tmp_path: Path) -> None:
    served = serve(remembering_run(tmp_path / "run"))
    with contextlib.closing(Client(served.url)) as first, contextlib.closing(Client(served.url)) as second:
        zeros = np.zeros(3)
        assert [first.action(zeros) for _ in range(3)] == [0, 1, 2]
        assert [second.action(zeros) for _ in range(2)] == [0, 1]
        assert [first.action(zeros), second.action(zeros)] == [3, 2]
        assert [first.action(zeros, reset=True), first.action(zeros), second.action(zeros)] == [0, 1, 3]
    with contextlib.closing(Client(served.url)) as third:  # in a slot that another client had
        assert third.action(zeros) == 0


def test_metadata_says_what_to_send_and_status_shows_the_client(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)), max_slots=4)
    with contextlib.closing(Client(served.url)) as client:
        assert client.metadata == {
            "env": "Signed-v0",
            "observation": {"observation": "float32[3]"},
            "action": "17 actions",
            "action_horizon": 1,
        }
        answer = client.infer([0, 1, 2])
        assert (answer["actions"].shape, answer["actions"].tolist()) == ((1,), [11])
        assert answer["server_timing"]["infer_ms"] > 0
        status = ask_status(Link(served.config.listen, SecurityConfig()), seconds=10)
        assert [actor.name.startswith("websocket-127.0.0.1:") for actor in status.actors] == [True]


def test_full_server_refuses_one_client_more_and_has_room_again_later(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)), envs=1, max_slots=2)
    with contextlib.closing(Client(served.url)), contextlib.closing(Client(served.url)) as second:
        with contextlib.ExitStack() as stack:
            socket = stack.enter_context(connect(served.url, compression=None))
            assert "2 of 2 slots are taken" in str(socket.recv())
        assert second.action(np.zeros(3)) == 11
    eventually(lambda: not served.serving.deployment.inference.sessions.open)
    with contextlib.closing(Client(served.url)) as client:
        assert client.action(np.zeros(3)) == 11


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pack({"observation": np.zeros(4)}), r"observation: expected float32\[3\], saw float64\[4\]"),
        (pack({"observation": np.array([0, np.nan, 0])}), "expected finite numbers"),
        (pack({"other": 1}), "observation: expected among the keys"),
        (b"\xc1", "expected msgpack"),
        ("a text", "expected a binary message"),
    ],
    ids=["shape", "NaN", "key", "bytes", "text"],
)
def test_bad_message_is_explained_and_hurts_nobody_else(serve: Any, tmp_path: Path, data: Any, words: str) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)))
    with contextlib.closing(Client(served.url)) as bad, contextlib.closing(Client(served.url)) as good:
        bad.socket.send(data)
        told = bad.socket.recv()
        assert isinstance(told, str)
        assert re.search(words, told)
        with pytest.raises(ConnectionClosed, match="1008"):
            bad.socket.recv()
        assert good.action(np.zeros(3)) == 11


def test_message_longer_than_an_observation_can_be_is_not_read(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)))
    with contextlib.closing(Client(served.url)) as client:
        client.socket.send(msgpack.packb({"observation": bytes(10**6)}))
        with pytest.raises(ConnectionClosed, match="1009"):
            client.socket.recv()


def test_page_of_another_site_is_refused(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)))
    with pytest.raises(InvalidStatus, match="403"):
        Client(served.url, origin="https://elsewhere.example")


def test_token_and_tls_are_asked_for_as_by_a_learner(serve: Any, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    security = replace(certificates.server, token_file=certificates.token)
    served = serve(make_run(tmp_path / "run", favouring(11)), security=security)
    url = served.url.replace("ws://127.0.0.1", "wss://localhost")
    trusting = ssl.create_default_context(cafile=certificates.ca)
    for shown in ("", "Api-Key wrong", TOKEN):
        with pytest.raises(InvalidStatus, match="401"):
            Client(url, ssl=trusting, additional_headers={"Authorization": shown})
    for shown in (f"Api-Key {TOKEN}", f"Bearer {TOKEN}"):
        with contextlib.closing(Client(url, ssl=trusting, additional_headers={"Authorization": shown})) as client:
            assert client.action(np.zeros(3)) == 11


@pytest.mark.parametrize(
    ("websocket", "words"),
    [
        ("0.0.0.0:8000", "websocket=0.0.0.0:8000 reaches beyond this machine without TLS"),
        ("unix:x", "must be HOST:PORT"),
    ],
)
def test_address_that_others_reach_needs_tls_and_token(tmp_path: Path, websocket: str, words: str) -> None:
    run = make_run(tmp_path / "run", favouring(11))
    with pytest.raises(ConfigError, match=words):
        Serving(ServeConfig(run=str(run), websocket=websocket), print)


def test_end_of_the_server_closes_the_sockets_of_its_clients(serve: Any, tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "run", favouring(11)))
    with contextlib.closing(Client(served.url)) as client:
        client.action(np.zeros(3))
        served.ask_to_stop()
        with pytest.raises(ConnectionClosed):
            client.socket.recv()
