"""Rows per second of the serving path (upload, record, forward, sample, answer) against a bare forward of the model."""

import numpy as np
import torch

from bench.harness import Report, against_floor
from bench.rig import CPU, Overwritten
from seedrl.actions import Actions
from seedrl.config import BenchConfig, ModelConfig
from seedrl.metrics import ServingMetrics
from seedrl.models.build import build_model
from seedrl.policy import Policy
from seedrl.rows import RESET, Rows
from seedrl.serving.inference import Inference
from seedrl.serving.lease import Lease
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import Slots
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelInput
from seedrl.wire.messages import Hello

FRAME_STACK = 4
FRAME = ArraySpec((1, 84, 84), "uint8")
SPEC = EnvSpec(FRAME, discrete(6))
STACKED = SPEC.stacked(FRAME_STACK)
HEADLINE_ROWS = 64


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    report = Report("inference")
    for rows in (8, 16, 32, HEADLINE_ROWS, 128):
        path = ServingPath(rows)
        works = {"serving": path.serve, "bare": path.bare}
        is_headline = rows == HEADLINE_ROWS
        name = "inference_over_bare" if is_headline else f"inference_over_bare_{rows}_rows"
        against_floor(report, config, works, name, {"rows": rows}, "rows", bound=0.9 if is_headline else None)
    return report


class ServingPath:
    """One request of `rows` rows again and again, through all of `Inference` or through the model alone."""

    def __init__(self, rows: int, model: str = "nature") -> None:
        self._rows = rows
        self._model = build_model(ModelConfig(name=model), STACKED, seed=1)
        sizes = StoreSizes(rows, capacity=4 * rows, unroll_length=20, frame_stack=FRAME_STACK, core_size=0)
        store = Store(SPEC, Overwritten(), sizes, CPU)
        self._inference = Inference(
            Policy(self._model, version=0),
            Actions(SPEC),
            Slots(rows, Actions(SPEC), FRAME_STACK, 0, CPU),
            Seats(rows),
            store,
            ServingMetrics(),
            generator=torch.Generator().manual_seed(1),
            device=CPU,
            answer=lambda answers: None,
        )
        slots = np.arange(rows)
        session = Session(id=1, hello=Hello("bench"), lease=Lease(slots, np.zeros(rows, np.uint8)))
        frames = np.random.default_rng(1).integers(0, 255, (rows, *FRAME.shape)).astype(np.uint8)
        first, later = (
            Rows(slots.astype(np.int32), frames, np.zeros(rows, np.float32), np.full(rows, flags, np.uint8))
            for flags in (RESET, 0)
        )
        self._inference.run([Request(session, 1, first, slots)])
        self._request = Request(session, 2, later, slots)
        self._stacks = torch.from_numpy(np.repeat(frames, FRAME_STACK, axis=1)).unsqueeze(0)

    def serve(self) -> int:
        self._inference.run([self._request])
        self._inference.finish_unrolls()
        return self._rows

    @torch.inference_mode()
    def bare(self) -> int:
        nothing = torch.zeros(1, self._rows)
        inputs = ModelInput(self._stacks, nothing, nothing.long(), nothing.bool())
        self._model(inputs, torch.zeros(self._rows, 0))
        return self._rows
