"""Training from a full store (gather, loss, clip, optimiser, publish) against a bare forward and backward."""

import numpy as np
import torch

from bench.harness import Report, against_floor
from bench.inference import FRAME, FRAME_STACK, SPEC, STACKED
from bench.rig import CPU, vtrace_config
from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.columns import Record
from seedrl.config import BenchConfig, ModelConfig
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics
from seedrl.models.build import build_model
from seedrl.policy import Policy
from seedrl.selection.fifo import Fifo
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelOutput, Ticket

HEADLINE_UNROLLS = 32


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in the learner's threads
    report = Report("learner")
    for unrolls in (8, HEADLINE_UNROLLS):
        full = FullStore(unrolls)
        works = {"learner": full.update, "bare": full.bare}
        is_headline = unrolls == HEADLINE_UNROLLS
        name = "learner_over_bare" if is_headline else f"learner_over_bare_{unrolls}_unrolls"
        against_floor(report, config, works, name, {"unrolls": unrolls}, "steps", bound=0.95 if is_headline else None)
    return report


class FullStore:
    """Updates from a store that is always full, or the model alone on one of its train batches."""

    def __init__(self, unrolls: int, model: str = "nature") -> None:
        config = vtrace_config()
        config.algorithm.batch_size = unrolls
        self._model = build_model(ModelConfig(name=model, popart=False), STACKED, seed=1)
        sizes = StoreSizes(1, unrolls, config.algorithm.unroll_length, FRAME_STACK, core_size=0)
        self._store = Store(SPEC, Fifo(), sizes, CPU)
        self._policy = Policy(self._model, version=0)
        self._learner = Learner(
            config,
            self._model,
            build_algorithm(config.algorithm, Actions(SPEC), self._model),
            LearningMetrics(),
            env_steps=lambda: 0,
            prefer=self._store.prefer,
        )
        self._write_noise(unrolls)
        self._fill()
        ticket = Ticket(np.arange(1, unrolls + 1), np.zeros(unrolls, np.int64))
        self._batch = self._store.columns.gather(ticket, np.ones(unrolls, np.float32))
        self._unrolls = unrolls
        self._steps = unrolls * config.algorithm.unroll_length

    def _write_noise(self, unrolls: int) -> None:
        """Frames, rewards and logits as a run might have them: gradients that vanish have another cost."""
        entry = np.arange(1, unrolls + 1)
        random = np.random.default_rng(1)
        for t in range(self._store.columns.unroll_length + 1):
            age = np.full(unrolls, min(t, FRAME_STACK - 1))
            action = random.integers(0, SPEC.policy_size, unrolls)
            reward = random.standard_normal(unrolls, np.float32)
            frames = random.integers(0, 255, (unrolls, *FRAME.shape), np.uint8)
            logits = 0.1 * random.standard_normal((unrolls, SPEC.policy_size), np.float32)
            place = self._store.columns.locate(entry, np.full(unrolls, t), age)
            self._store.columns.write_frames(place.frame, frames)
            record = Record(reward, np.zeros(unrolls, np.uint8), age, action, action, policy_version=np.array(0))
            self._store.columns.write_record(place, record)
            self._store.columns.write_output(place, ModelOutput(torch.from_numpy(logits), torch.zeros(unrolls)))

    def update(self) -> int:
        unrolls = self._store.take(self._unrolls, timeout=0)
        assert unrolls is not None
        self._learner.train(unrolls)
        self._learner.publish(self._policy)
        self._fill()
        return self._steps

    def bare(self) -> int:
        self._model.zero_grad(set_to_none=True)
        output, _ = self._model(self._batch.inputs, self._batch.core_state)
        (output.logits.sum() + output.value.sum()).backward()
        return self._steps

    def _fill(self) -> None:
        self._store.commit(self._store.reserve(self._store.capacity))
