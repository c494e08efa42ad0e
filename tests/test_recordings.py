"""Recorded unrolls: what is written is what is trained on, in an order that follows from the seed, or it is refused."""

import json
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.metrics import ServingMetrics
from seedrl.recordings import recorder as recorders
from seedrl.recordings.files import MANIFEST, Content, Manifest, Recording, load_shard
from seedrl.recordings.places import Place, RemotePath, place_of, replace
from seedrl.recordings.recorder import UnrollRecorder
from seedrl.recordings.source import RecordedUnrolls, check_recording
from seedrl.run.checkpoint import Tensors
from seedrl.selection.build import build_selector
from seedrl.specs import encoded_spec
from seedrl.store import Store, StoreSizes
from seedrl.validation import check
from tests.builders import record
from tests.fakes import make_spec
from tests.rig import CPU, make_model

SPEC = make_spec()
CONTENT = Content("Fake-v0", encoded_spec(SPEC), unroll_length=3, frame_stack=1)


@pytest.fixture(params=["path", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A directory for a recording: on this machine, and behind URLs of two kinds."""
    urls = {"path": str(tmp_path), "memory": f"memory://recordings{tmp_path}", "file": f"file://{tmp_path}/"}
    return place_of("source", urls[request.param])


def make_recorder(directory: Place, content: Content = CONTENT, **options: Any) -> UnrollRecorder:
    """Return a recorder that has begun, with a shard for every two commits."""
    given = {"most_bytes": 1e9, "say": pytest.fail, "on_failure": pytest.fail, "shard_bytes": 1200, **options}
    recorder = UnrollRecorder(directory, content, "tests", **given)
    recorder.start()
    return recorder


def make_store(record_to: UnrollRecorder | None = None, core_size: int = 0, **settings: Any) -> Store:
    config = LearnerConfig()
    config.algorithm.batch_size = 4
    for name, value in settings.items():
        setattr(config.store, name, value)
    sizes = StoreSizes(1, 8 if config.store.select == "fifo" else 64, 3, 1, core_size)
    return Store(SPEC, build_selector(config), sizes, CPU, record=record_to.record if record_to else None)


def dump(directory: Place, commits: int, first: int = 0, **options: Any) -> None:
    """Record 4 unrolls in each commit; the reward of a row tells which unroll it is in."""
    recorder = make_recorder(directory, **options)
    store = make_store(recorder)
    for number in range(first, first + commits):
        numbers = 4.0 * number + torch.arange(4.0)
        record(store, make_model(SPEC), SPEC, 4, seed=number, reward=lambda reward, n=numbers: n.expand_as(reward))
        assert store.take(4, timeout=0) is not None
    assert recorder.close(30.0)


def trained_on(source: RecordedUnrolls, batches: int) -> list[list[float]]:
    """Return the numbers of the unrolls in each train batch."""
    numbers = []
    for _ in range(batches):
        assert source.wait_for(4, timeout=0)
        unrolls = source.take(4, timeout=0)
        assert unrolls is not None
        numbers.append(unrolls.inputs.reward[0].tolist())
    return numbers


def make_source(directory: Place, seed: int = 1, metrics: ServingMetrics | None = None, **settings: Any) -> Any:
    recording = Recording.open(directory)
    return RecordedUnrolls(recording, make_store(**settings), metrics or ServingMetrics(), seed, updates=lambda: 5)


def test_recorded_unrolls_are_trained_on_once_in_each_epoch_in_an_order_of_the_seed(place: Place) -> None:
    dump(place / "rank-0", commits=6)
    first, again, other = (trained_on(make_source(place, seed), 12) for seed in (1, 1, 2))
    assert first == again != other
    for epoch in (first[:6], first[6:]):
        assert sorted(chain(*epoch)) == list(range(24))
    assert first[:6] != first[6:]


def test_recorded_unrolls_are_those_that_were_committed(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "rank-0")
    store = make_store(recorder)
    record(store, make_model(SPEC), SPEC, 4)
    committed = store.take(4, timeout=0)
    assert recorder.close(30.0)
    source = make_source(tmp_path)
    assert source.wait_for(4, timeout=0)
    unrolls = source.take(4, timeout=0)
    assert committed is not None
    order = [committed.behavior_value[0].tolist().index(value) for value in unrolls.behavior_value[0].tolist()]
    expected = committed.select(torch.tensor(order))
    assert all(torch.equal(here, there) for here, there in zip(unrolls.tensors(), expected.tensors(), strict=True))
    assert (unrolls.policy_version == 5).all()


def test_source_continues_where_the_counters_are(tmp_path: Path) -> None:
    dump(tmp_path / "rank-0", commits=5)
    expected = trained_on(make_source(tmp_path), 9)
    metrics = ServingMetrics()
    assert trained_on(make_source(tmp_path, metrics=metrics), 6) == expected[:6]
    assert (metrics.unrolls_made, metrics.env_steps) == (24, 72)
    assert trained_on(make_source(tmp_path, metrics=metrics), 3) == expected[6:]


def test_source_feeds_a_replay_memory_with_everything(tmp_path: Path) -> None:
    dump(tmp_path / "rank-0", commits=6)
    settings = {"select": "uniform", "capacity": 64, "min_size": 8}
    seen = [trained_on(make_source(tmp_path, **settings), 60) for _ in range(2)]
    assert seen[0] == seen[1]
    counts = Counter(chain(*seen[0]))
    assert len(counts) == 24


def test_recording_of_several_processes_is_trained_on_by_one(place: Place) -> None:
    dump(place / "rank-0", commits=2)
    dump(place / "rank-1", commits=3, first=2)
    assert sorted(chain(*trained_on(make_source(place), 5))) == list(range(20))


def test_recording_is_continued_and_the_oldest_shards_are_deleted_beyond_the_bound(place: Place) -> None:
    folder = place / "rank-0"
    dump(folder, commits=4)
    first = Manifest.read(folder).shards
    dump(folder, commits=4, first=4, most_bytes=3 * first[0].bytes)
    shards = Manifest.read(folder).shards
    assert [shard.name for shard in shards][-1] == "unrolls-000003.safetensors"
    assert sum(shard.bytes for shard in shards) <= 3 * first[0].bytes
    there = sorted(str(path) for path in folder.glob("*.safetensors"))
    assert there == [str(folder / shard.name) for shard in shards]
    assert 31.0 in load_shard(folder / shards[-1].name)["reward"]


def test_bit_that_has_flipped_is_refused_with_the_name_of_its_file(place: Place) -> None:
    dump(place / "rank-0", commits=6)
    path = place / "rank-0" / "unrolls-000001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    replace(path, bytes(content))
    with pytest.raises(ConfigError, match=r"rank-0/unrolls-000001.safetensors does not match its manifest"):
        Recording.open(place)


def remove_shard(folder: Place) -> None:
    (folder / "unrolls-000000.safetensors").unlink()


def cut_manifest(folder: Place) -> None:
    replace(folder / MANIFEST, (folder / MANIFEST).read_bytes()[:50])


def change_format(folder: Place) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    replace(folder / MANIFEST, json.dumps({**manifest, "format": 9}).encode())


def remove_manifest(folder: Place) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_shard, "unrolls-000000.safetensors cannot be read"),
        (cut_manifest, "manifest.json cannot be read"),
        (change_format, "manifest.json has format 9; this version of seedrl reads 1"),
        (remove_manifest, "holds no recorded unrolls; store.dump=DIR records some"),
    ],
)
def test_recording_that_cannot_be_used_is_refused_by_name(damage: Any, words: str, place: Place) -> None:
    dump(place / "rank-0", commits=2)
    damage(place / "rank-0")
    with pytest.raises(ConfigError, match=words):
        Recording.open(place)


def test_recording_of_other_settings_is_neither_continued_nor_trained_on(place: Place) -> None:
    dump(place / "rank-0", commits=2)
    other = Content("Fake-v0", CONTENT.spec, unroll_length=7, frame_stack=1)
    with pytest.raises(ConfigError, match="holds unrolls of other settings"):
        make_recorder(place / "rank-0", other)
    with pytest.raises(ConfigError, match=r"recorded with algorithm.unroll_length=3; set that, not 7"):
        check_recording(Recording.open(place), "Fake-v0", 7, 1)


def test_core_state_of_another_model_begins_at_zero(tmp_path: Path) -> None:
    dump(tmp_path / "rank-0", commits=1)
    store = make_store(core_size=3)
    source = RecordedUnrolls(Recording.open(tmp_path), store, ServingMetrics(), 1, updates=lambda: 0)
    assert source.wait_for(4, timeout=0)
    unrolls = source.take(4, timeout=0)
    assert unrolls is not None
    assert unrolls.core_state.tolist() == [[0.0] * 3] * 4


def test_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Place, number: int, unrolls: Tensors) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(recorders, "write_shard", full)
    said: list[str] = []
    dump(tmp_path / "rank-0", commits=40, say=said.append)
    assert said == [f"learner: unrolls are no longer recorded in {tmp_path / 'rank-0'}: No space left on device"]


def test_thread_that_dies_is_reported_and_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "write_shard", lambda *_: 1 / 0)
    errors: list[BaseException] = []
    dump(tmp_path / "rank-0", commits=40, on_failure=errors.append)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_place_of_a_path_needs_no_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert place_of("store.dump", "some/where") == Path("some/where")
    with pytest.raises(ConfigError, match=r"store.dump=memory://a needs fsspec, .* pip install 'seedrl\[remote\]'"):
        place_of("store.dump", "memory://a")


def test_place_of_a_kind_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"source=nowhere://a/b cannot be opened: Protocol not known: nowhere"):
        place_of("source", "nowhere://a/b")


def test_place_whose_package_is_missing_is_refused_with_the_name_of_that_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"store.dump=s3://bucket/a cannot be opened: Install s3fs"):
        place_of("store.dump", "s3://bucket/a")


def test_remote_path_has_the_words_of_its_url() -> None:
    place = place_of("source", "memory://recordings/of/a/run/")
    assert isinstance(place, RemotePath)
    assert str(place / "rank-0") == "memory://recordings/of/a/run/rank-0"
    assert str((place / "rank-0" / MANIFEST).parent) == "memory://recordings/of/a/run/rank-0"
    assert not (place / "rank-0").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store.dump": "there"}, "brings nothing new to record"),
        ({"ranks.count": 2}, "in one process and without actors, not ranks.count=2"),
        ({"store.dump_gb": 0.0}, "store.dump_gb=0.0 must be positive"),
    ],
)
def test_source_with_settings_that_contradict_it_is_refused(settings: dict[str, Any], words: str) -> None:
    config = LearnerConfig(source="here")
    for name, value in settings.items():
        group, _, key = name.partition(".")
        setattr(getattr(config, group), key, value)
    with pytest.raises(ConfigError, match=words):
        check(config)
