"""Ship weights to the actors, or observations to the learner? CPU per environment step of either, from measured parts.

Observations (SEED): every row travels once, in a message of a group, and the learner's forward is of large batches.
Weights (IMPALA): every actor gets the weights after each update and runs the forward itself, on the rows of one group;
its unrolls travel to the learner all the same, in messages as large as one likes, since that is where training is.

What decides is how many steps an actor takes between two publishes: over so many steps the weights it was sent pay off.
The crossover is the number up to which observations are cheaper.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import safetensors.torch
import torch

from bench.echo import EchoServer
from bench.harness import Ratio, Report, Turn, children, cpu_seconds, for_a_while, interleave
from bench.rig import private_address
from seedrl.config import BenchConfig, ModelConfig
from seedrl.models.build import build_model
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.types import ModelInput

GROUP = 32  # rows of one request, and of an actor's own forward
CENTRAL = 256  # rows of a full batch of the learner
UNROLL = 20  # steps
ACTORS = 32
PRESET_STEPS = 8 * UNROLL  # per update of the presets, by all actors; every update publishes
ROW_OVERHEAD = 4 + 4 + 1  # environment, reward, flags
CHUNK = 2**20  # bytes; weights and unrolls travel in messages of at most this size
WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    env: str
    frame: EnvSpec
    frame_stack: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.env}_{self.model}"

    @property
    def row_bytes(self) -> int:
        return self.frame.row_bytes + ROW_OVERHEAD

    @property
    def unroll_row_bytes(self) -> int:
        """Return the bytes of a row with the logits and the action, which the learner did not see itself."""
        return self.row_bytes + 4 * self.frame.policy_size + 4

    @property
    def unroll_rows(self) -> int:
        """Rows in one message: the unrolls of a group, if they fit."""
        return min(GROUP * UNROLL, CHUNK // self.unroll_row_bytes)


CARTPOLE = EnvSpec(ArraySpec((4,), "float32"), discrete(2))
PONG = EnvSpec(ArraySpec((1, 84, 84), "uint8"), discrete(6))
CASES = (Case("cartpole", CARTPOLE, 1, "mlp"), Case("pong", PONG, 4, "nature"), Case("pong", PONG, 4, "impala"))


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU µs of the parts, in one repeat."""

    observation: float  # one row on its way to the learner, and its action back; both ends
    unroll_row: float  # one row as a part of an unroll
    transmit: float  # the weights to one actor; both ends
    serialise: float  # the weights, once for all actors
    load: float  # the weights, in each actor
    actor_forward: float  # one row of a group's batch
    central_forward: float  # one row of a full batch

    def observations(self, accelerator: bool) -> float:
        """Per environment step. With an accelerator the central forward costs no CPU to speak of."""
        return self.observation + (0.0 if accelerator else self.central_forward)

    @property
    def publish(self) -> float:
        """Per actor, with its share of the work done once for all."""
        return self.transmit + self.load + self.serialise / ACTORS

    def weights(self, steps: float) -> float:
        """Per environment step, if an actor takes so many from one publish to the next."""
        return self.unroll_row + self.actor_forward + self.publish / steps

    def crossover(self, accelerator: bool) -> float | None:
        """Steps per actor and publish up to which observations are cheaper; None if they always are."""
        ahead = self.observations(accelerator) - self.unroll_row - self.actor_forward
        return self.publish / ahead if ahead > 0 else None


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    report = Report("weights_or_observations")
    replicas = {case: Replica(case) for case in CASES}
    turns = interleave(_sides(replicas, config.seconds), config.repeats)
    for case, replica in replicas.items():
        by_repeat = [{part: each[i].cpu_us for part, each in turns.items()} for i in range(config.repeats)]
        _add(report, case, replica, [_costs(case, replica, cpu_us) for cpu_us in by_repeat])
    report.note("Observations are cheaper up to so many steps of an actor between two publishes.")
    report.note(f"Times are CPU µs. Groups of {GROUP} rows, full batches of {CENTRAL}, unrolls of {UNROLL} steps.")
    report.note(f"Ratios are for {ACTORS} actors, {PRESET_STEPS} steps per update (the presets' batch), a CPU learner.")
    return report


class Replica:
    """An actor's copy of the model in the IMPALA way of doing things."""

    def __init__(self, case: Case) -> None:
        spec = case.frame.stacked(case.frame_stack)
        self._model = build_model(ModelConfig(name=case.model), spec, seed=1)
        self._spec = spec
        self._inputs = {rows: self._noise(rows) for rows in (GROUP, CENTRAL)}
        self._saved = self._save()
        self.weight_bytes = len(self._saved)

    def _noise(self, rows: int) -> ModelInput:
        frame = self._spec.observation
        assert isinstance(frame, ArraySpec)
        observation = torch.randint(0, 255, (1, rows, *frame.shape)).to(getattr(torch, frame.dtype))
        nothing = torch.zeros(1, rows)
        return ModelInput(observation, nothing, nothing.long(), nothing.bool())

    def _save(self) -> bytes:
        state = {name: tensor.contiguous() for name, tensor in self._model.state_dict().items()}
        return bytes(safetensors.torch.save(state))

    def serialise(self) -> int:
        self._save()
        return 1

    def load(self) -> int:
        self._model.load_state_dict(safetensors.torch.load(self._saved))
        return 1

    @torch.inference_mode()
    def forward(self, rows: int) -> int:
        self._model(self._inputs[rows], torch.zeros(rows, 0))
        return rows


Part = tuple[str, object]  # what is measured, and of what


def _sides(replicas: dict[Case, Replica], seconds: float) -> dict[Part, Callable[[], Turn]]:
    """Everything in one interleaved run, so that the parts belong together."""
    works: dict[Part, Callable[[], int]] = {}
    sides: dict[Part, Callable[[], Turn]] = {}
    for case, replica in replicas.items():
        works["serialise", case] = replica.serialise
        works["load", case] = replica.load
        works["actor", case] = partial(replica.forward, GROUP)
        works["central", case] = partial(replica.forward, CENTRAL)
        unrolls, chunk = case.unroll_rows * case.unroll_row_bytes, min(CHUNK, replica.weight_bytes)
        sides["observations", case.env] = partial(stream, GROUP * case.row_bytes, GROUP * 4, seconds / 2)
        sides["unrolls", case.env] = partial(stream, unrolls, 1, seconds / 2)
        sides["weights", chunk] = partial(stream, 1, chunk, seconds / 2)
    return {**sides, **for_a_while(works, seconds / 4)}


def stream(sent: int, answered: int, seconds: float) -> Turn:
    """Messages to a server and its answers, over gRPC; CPU of both ends."""
    with (
        private_address() as address,
        EchoServer(address, bytes(answered)) as server,
        children([[sys.executable, "-m", "bench.echo", address, str(sent), "2"]]) as clients,
    ):
        pids = [client.pid for client in clients]
        _wait_until(lambda: server.messages > 0)
        time.sleep(WARM_UP)
        count, began, cpu = server.messages, time.perf_counter(), time.process_time() + cpu_seconds(pids)
        time.sleep(seconds)
        cpu = time.process_time() + cpu_seconds(pids) - cpu
        return Turn(server.messages - count, time.perf_counter() - began, cpu)


def _wait_until(is_ready: Callable[[], bool], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > give_up:
            raise TimeoutError(f"no message within {seconds:g} s")
        time.sleep(0.02)


def _costs(case: Case, replica: Replica, cpu_us: dict[Part, float]) -> Costs:
    chunk = min(CHUNK, replica.weight_bytes)
    return Costs(
        observation=cpu_us["observations", case.env] / GROUP,
        unroll_row=cpu_us["unrolls", case.env] / case.unroll_rows,
        transmit=cpu_us["weights", chunk] * replica.weight_bytes / chunk,
        serialise=cpu_us["serialise", case],
        load=cpu_us["load", case],
        actor_forward=cpu_us["actor", case],
        central_forward=cpu_us["central", case],
    )


def _add(report: Report, case: Case, replica: Replica, repeats: list[Costs]) -> None:
    costs = Costs(*(statistics.median(getattr(each, name) for each in repeats) for name in Costs.__slots__))
    steps = PRESET_STEPS / ACTORS
    report.add(
        {
            "case": case.name,
            "bytes per step, observations": case.row_bytes,
            "bytes per step, weights": case.unroll_row_bytes + replica.weight_bytes / steps,
            "observations cheaper, CPU learner": crossover_words(costs.crossover(accelerator=False)),
            "observations cheaper, accelerator": crossover_words(costs.crossover(accelerator=True)),
        }
    )
    report.add({"case": case.name, **{name.replace("_", " "): getattr(costs, name) for name in Costs.__slots__}})
    values = [each.weights(steps) / each.observations(accelerator=False) for each in repeats]
    report.add_ratio(Ratio(f"weights_over_observations_{case.name}", values, at_most=False))
    report.detail[case.name] = {
        "publish": costs.publish,
        "weights": costs.unroll_row + costs.actor_forward,
        "observations": costs.observations(accelerator=False),
        "observations with accelerator": costs.observations(accelerator=True),
    }


def crossover_words(steps: float | None) -> str:
    """Return where observations win, as a cell of the table."""
    return "always" if steps is None else f"up to {steps:,.0f} steps"
