"""The bank: entries that never change, bounded and spread over a run; one forward for each that acts in a batch."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from seedrl.bank import CURRENT, SPARE, Bank, Freezing
from seedrl.serving.mixture import forward_each
from seedrl.types import ModelInput, ModelOutput
from tests.builders import model_input, same, weights
from tests.fakes import TinyModel, make_spec

SPEC = make_spec(shape=(4,), num_actions=3)


def other_model(seed: int, core_size: int = 0) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyModel(SPEC, core_size)


def versions(bank: Bank) -> list[int]:
    return [entry.version for entry in bank.entries]


# One forward for each entry.


def run(model: nn.Module, inputs: ModelInput, core_state: torch.Tensor) -> tuple[ModelOutput, torch.Tensor]:
    """Return what a model gives for one row of each slot, without the time axis."""
    with torch.inference_mode():
        output, core_state = model(inputs.tree_map(lambda leaf: leaf.unsqueeze(0)), core_state)
    return ModelOutput(output.logits[0], output.value[0]), core_state


@pytest.mark.parametrize("entry", [[0] * 9, [5] * 9, [0, 1, 5, 1, 0, 1, 1, 5, 1], [5, 5, 5, 0, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("core_size", [0, 3])
def test_rows_of_a_batch_get_the_numbers_of_their_own_entry_bit_for_bit(entry: list[int], core_size: int) -> None:
    models = {number: other_model(number, core_size) for number in (0, 1, 5)}
    inputs = model_input(SPEC, 1, len(entry)).tree_map(lambda leaf: leaf[0])
    core_state = torch.randn(len(entry), core_size)
    ran: list[tuple[int, int]] = []

    def forward(number: int, own: ModelInput, state: torch.Tensor) -> tuple[ModelOutput, torch.Tensor]:
        ran.append((number, len(state)))
        return run(models[number], own, state)

    output, after = forward_each(np.array(entry), inputs, core_state, forward)
    counts = {number: entry.count(number) for number in set(entry)}
    assert dict(ran) == counts
    assert [count for _, count in ran] == sorted(counts.values(), reverse=True)  # each once, largest first
    for number in counts:
        at = torch.tensor([row for row, each in enumerate(entry) if each == number])
        alone, state = run(models[number], inputs.tree_map(lambda leaf, at=at: leaf[at]), core_state[at])
        assert torch.equal(output.logits[at], alone.logits)
        assert torch.equal(output.value[at], alone.value)
        assert torch.equal(after[at], state)


# Entries.


class Published:
    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, model: nn.Module, version: int) -> None:
        self.versions.append(version)


def test_snapshots_are_frozen_when_due_and_never_change() -> None:
    model, policy = other_model(1), Published()
    bank = Bank(model, snapshots=10, every=3)
    publisher, expected = Freezing(policy, bank), {}
    for version in range(10):
        if version % 3 == 0:
            expected[version] = weights(model)
        publisher.publish(model, version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1.0
    assert policy.versions == list(range(10))
    assert versions(bank) == [0, 3, 6, 9]
    for entry in bank.entries:
        assert same(weights(entry.model), expected[entry.version])
        assert not entry.model.training
        assert not any(parameter.requires_grad for parameter in entry.model.parameters())
    assert [entry.number for entry in bank.entries] == [1, 2, 3, 4]
    assert CURRENT not in [entry.number for entry in bank.entries]


def test_snapshots_are_bounded_and_spread_over_the_run() -> None:
    model = other_model(1)
    bank = Bank(model, snapshots=4, every=1)
    for version in range(65):
        bank.freeze_if_due(model, version)
        bank.drop_surplus(in_use=())
        assert len(bank.entries) <= 4
    kept = versions(bank)
    assert (kept[0], kept[-1]) == (0, 64)
    assert max(np.diff(kept)) <= 48
    assert min(np.diff(kept[:-1])) >= 8


def test_snapshots_that_play_stay_and_the_bank_waits_for_them() -> None:
    model = other_model(1)
    bank = Bank(model, snapshots=2, every=1)
    for version in range(10):
        bank.freeze_if_due(model, version)
        bank.drop_surplus(in_use={1, 2, 3, 4})
    assert versions(bank) == [0, 1, 2, 3]
    assert len(bank.entries) == 2 + SPARE
    bank.drop_surplus(in_use={2})
    assert versions(bank) == [0, 1, 3]
    bank.drop_surplus(in_use=())
    assert len(bank.entries) == 2


def test_policies_of_other_runs_never_make_room() -> None:
    model = other_model(1)
    bank = Bank(model, snapshots=1, every=1)
    bank.add("runs/rival", 70, other_model(2))
    for version in range(5):
        bank.freeze_if_due(model, version)
        bank.drop_surplus(in_use=())
    assert [(entry.name, entry.version) for entry in bank.entries] == [("runs/rival", 70), ("update 4", 4)]


def test_bank_is_restored_with_its_numbers_and_continues_them() -> None:
    model = other_model(1)
    bank = Bank(model, snapshots=3, every=5)
    bank.freeze_if_due(model, 0)
    bank.freeze_if_due(other_model(2), 5)
    again = Bank(model, snapshots=3, every=5)
    again.load(bank.state(), bank.tensors())
    assert [entry[:3] for entry in again.entries] == [entry[:3] for entry in bank.entries]
    for entry, saved in zip(again.entries, bank.entries, strict=True):
        assert same(weights(entry.model), weights(saved.model))
    again.freeze_if_due(model, 9)
    assert versions(again) == [0, 5]
    again.freeze_if_due(model, 10)
    assert again.entries[-1].number == 3


def test_entries_are_whole_while_another_thread_reads_them() -> None:
    model, stop = other_model(1), threading.Event()
    bank, seen = Bank(model, snapshots=3, every=1), []

    def read() -> None:
        while not stop.is_set():
            bank.drop_surplus(in_use=())
            seen.append([entry.number for entry in bank.entries])

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(200):
        bank.freeze_if_due(model, version)
    stop.set()
    thread.join()
    assert all(numbers == sorted(set(numbers)) and len(numbers) <= 3 + SPARE for numbers in seen)
