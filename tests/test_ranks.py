"""Several ranks as real processes: k ranks with parts of a train batch do what one does with the whole of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from seedrl.errors import ConfigError, RankLost
from tests.by_torchrun import torchrun
from tests.integration.waiting import DEADLINE, free_address
from tests.ranked import CASES, SEPARATE, UPDATES, WORLD, joined, tensors_of_all_types, train, train_in_one

pytestmark = pytest.mark.long

Seen = dict[str, Tensor]
IDLE = [name for name, case in CASES.items() if case.is_last_idle]
SYNCED = [name for name, case in CASES.items() if case.sync_every == 1]
EXACT = [name for name in SYNCED if not (CASES[name].poisoned or CASES[name].draws or name in IDLE)]
LOCAL = [name for name, case in CASES.items() if case.sync_every > 1]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """Return what each rank had after every update, by case; all cases in one pair of processes."""
    out = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        torchrun(WORLD, "-m", "tests.ranked", str(out)), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    ranked = {
        name: [safetensors.torch.load_file(out / str(rank) / f"{name}.safetensors") for rank in range(WORLD)]
        for name in (*CASES, "types")
    }
    return {**ranked, **{name: [safetensors.torch.load_file(out / f"{name}.safetensors")] for name in SEPARATE}}


@pytest.mark.parametrize("case", EXACT)
def test_ranks_with_parts_of_a_batch_make_the_updates_of_one_with_all_of_it(
    case: str, seen: dict[str, list[Seen]]
) -> None:
    alone = joined(CASES[case])
    for rank in seen[case]:
        assert rank.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(rank[name], tensor, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    moved = [
        name
        for name in alone
        if name.startswith("0/") and (alone[name] - alone[f"{UPDATES - 1}{name[1:]}"]).abs().max() > 1e-3
    ]
    assert moved, "nothing was trained, so nothing was compared"


@pytest.mark.parametrize("case", SYNCED)
def test_ranks_hold_the_same_weights_to_the_bit_after_every_update(case: str, seen: dict[str, list[Seen]]) -> None:
    first, second = seen[case]
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", IDLE)
def test_rank_without_a_batch_changes_nothing_and_gets_what_the_other_has_trained(
    case: str, seen: dict[str, list[Seen]]
) -> None:
    every = CASES[case].sync_every
    alone = train(CASES[case], CASES[case].parts(CASES[case].share), part_of=WORLD, rank=0)
    first, second = seen[case]
    for name, tensor in alone.items():
        is_shared = (int(name.partition("/")[0]) + 1) % every == 0
        for rank in (first, second) if is_shared else (first,):
            torch.testing.assert_close(rank[name], tensor, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_ranks_leave_an_update_out_together_if_the_loss_of_one_is_not_finite(seen: dict[str, list[Seen]]) -> None:
    for rank in seen["poisoned"]:
        skipped = [rank[f"{update}/versions"].tolist() for update in range(UPDATES)]
        assert skipped == [[1, 0], [2, 1], [3, 1], [4, 2], [5, 2]]
        names = [name.removeprefix("0/") for name in rank if name.startswith("0/") and "layers" in name]
        assert names
        for name in names:
            assert torch.equal(rank[f"1/{name}"], rank[f"0/{name}"])
            assert not torch.equal(rank[f"2/{name}"], rank[f"1/{name}"])


@pytest.mark.parametrize("case", LOCAL)
def test_ranks_with_local_updates_differ_until_they_average_their_weights(
    case: str, seen: dict[str, list[Seen]]
) -> None:
    first, second = seen[case]
    for update in range(UPDATES):
        is_synced = (update + 1) % CASES[case].sync_every == 0
        differing = [n for n in first if n.startswith(f"{update}/") and not torch.equal(first[n], second[n])]
        assert bool(differing) is not is_synced, (update, differing)
        assert torch.equal(first[f"{update}/versions"], second[f"{update}/versions"])


def test_ranks_average_the_weights_that_each_would_have_reached_alone(seen: dict[str, list[Seen]]) -> None:
    case = CASES["local"]
    alone = [train(case, case.parts(case.share), WORLD, rank) for rank in range(WORLD)]
    last = f"{case.sync_every - 1}/"
    for name in (name for name in alone[0] if name.startswith(last) and "norm" not in name.rpartition("/")[2]):
        mean = (alone[0][name] + alone[1][name]) / 2
        torch.testing.assert_close(seen["local"][0][name], mean.to(alone[0][name].dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", SEPARATE)
def test_ranks_that_serve_and_train_apart_serve_what_one_process_would(case: str, seen: dict[str, list[Seen]]) -> None:
    """To the bit: the same batches, from the same weights, in the same order; versions, lags and priorities, too."""
    (apart,), alone = seen[case], train_in_one(SEPARATE[case])
    assert int(apart.pop("publish_lags")) == UPDATES - 1  # each is told with the next update
    assert apart.keys() == alone.keys()
    assert [name for name in alone if not torch.equal(apart[name], alone[name])] == []


def test_tensors_of_every_type_are_broadcast_as_they_are(seen: dict[str, list[Seen]]) -> None:
    """gloo has no int16, for example, which observations may have."""
    sent = tensors_of_all_types()
    for rank in seen["types"]:
        assert len(rank) == len(sent)
        for number, tensor in enumerate(sent):
            assert torch.equal(rank[str(number)].view(tensor.dtype), tensor), tensor.dtype


def test_ranks_with_unlike_devices_all_end_with_the_reason() -> None:
    """The first rank, with which the place ends where they meet, stays until the others know."""
    port = free_address().rpartition(":")[2]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.unlike_ranks"]
    ranks = [
        subprocess.Popen([*command, kind], env={**where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank, kind in enumerate(("cuda", "cpu"))
    ]
    words = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ConfigError.exit_code] * 2
    assert words[0] == words[1]
    assert "rank 0 on host-0 has cuda, rank 1 on host-1 has cpu" in words[0]


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_rank_whose_fellow_dies_or_hangs_ends_with_a_reason_and_never_waits_for_ever(
    fault: str, tmp_path: Path
) -> None:
    port = free_address().rpartition(":")[2]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.lost_rank", fault, str(tmp_path)]
    first, second = (
        subprocess.Popen(command, env={**where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    )
    try:
        words, _ = first.communicate(timeout=DEADLINE)
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == RankLost.exit_code == 9
    assert "another rank is gone or has not answered for ranks.timeout seconds (" in words
