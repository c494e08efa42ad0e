"""Episodes played by a policy, and what is filmed of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import imageio_ffmpeg
import numpy as np
import pytest
import torch

from envs_server.drawing import why_not_drawn
from seedrl.columns import Columns
from seedrl.config import EnvConfig, ModelConfig, RecordConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.videos import Videos
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.trained.play import Moment, job_of, play
from seedrl.trained.player import FrameStack
from seedrl.trained.record import CAPTION_HEIGHT, GRID, Thinned, as_picture, fitted, grid_of, picture_in, run_record
from tests.fakes import FakeClock, make_spec
from tests.trained_runs import leave_trained, make_trained

MODULE = "tests.drawing_envs"


COUNTER = EnvConfig(id=f"{MODULE}:Counter")
SCREEN = EnvConfig(id=f"{MODULE}:Screen", frame_stack=4)
SCREEN_SPEC = EnvSpec(ArraySpec((1, 40, 40), "uint8"), discrete(3))


def played(run_dir: Path, episodes: int, max_steps: int = 100) -> list[Moment]:
    trained = make_trained(run_dir, make_spec((2,)), COUNTER)
    return list(play(trained, job_of(COUNTER, seed=1), episodes, max_steps))


# Playing


def test_play_shows_every_moment_of_every_episode(tmp_path: Path) -> None:
    moments = played(tmp_path / "run", episodes=2)
    assert [(moment.episode, moment.step) for moment in moments] == [
        (each, step) for each in (0, 1) for step in range(6)
    ]
    assert [moment.is_last for moment in moments] == [False, False, False, False, False, True] * 2
    assert sum(moment.reward for moment in moments) == 10
    assert all(moment.frame is None for moment in moments)


def test_play_of_an_episode_that_is_cut_short_goes_on_with_the_next(tmp_path: Path) -> None:
    moments = played(tmp_path / "run", episodes=2, max_steps=3)
    assert [(moment.episode, moment.step) for moment in moments] == [
        (each, step) for each in (0, 1) for step in range(4)
    ]
    assert [moment.is_last for moment in moments] == [False, False, False, True] * 2
    assert [moment.is_cut for moment in moments] == [False, False, False, True] * 2
    assert [moment.reward for moment in moments] == [0, 1, 1, 1] * 2


def test_play_counts_games_and_not_lives(tmp_path: Path) -> None:
    """A game of Breakout has five lives: each ends an episode for the policy, and only the last ends the game."""
    env = EnvConfig(id="Breakout-v5", options={"stack_num": 1, "episodic_life": True}, frame_stack=4)
    trained = make_trained(tmp_path / "run", EnvSpec(ArraySpec((1, 84, 84), "uint8"), discrete(4)), env)
    moments = list(play(trained, job_of(env, seed=1), episodes=1, max_steps=5000))
    assert [moment.step for moment in moments] == list(range(len(moments)))
    assert [moment.is_last for moment in moments] == [False] * (len(moments) - 1) + [True]
    assert not moments[-1].is_cut
    assert len(moments) > 100  # a life without a single hit takes about 25 steps


def test_play_with_spaces_that_are_not_the_policys_says_so(tmp_path: Path) -> None:
    trained = make_trained(tmp_path / "run", make_spec((3,)), COUNTER)
    with pytest.raises(ConfigError, match="the policy was trained on"):
        next(play(trained, job_of(COUNTER, seed=1), 1, 10))


def test_play_with_memory_and_frames_feeds_both_back(tmp_path: Path) -> None:
    """A policy of its own for every moment would forget: the value of the same screen changes with what came before."""
    trained = make_trained(tmp_path / "run", SCREEN_SPEC, SCREEN, ModelConfig(name="nature", lstm=4))
    moments = list(play(trained, job_of(SCREEN, seed=1), 1, 100))
    assert [int(moment.observation[0, 0, 0, 0]) for moment in moments] == [0, 40, 80, 120, 160, 200]  # type: ignore[index]


def test_frame_stack_repeats_the_first_frame_of_an_episode() -> None:
    stack = FrameStack(make_spec((1,)), frames=3, rows=2)
    seen = [
        stack.add(torch.tensor([[number], [10.0 * number]]), torch.tensor([begins, number in (1, 3)]))
        for number, begins in zip((1, 2, 3, 4, 5), (True, False, False, False, True), strict=True)
    ]
    assert [stacks[0].tolist() for stacks in seen] == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4], [5, 5, 5]]
    assert [stacks[1].tolist() for stacks in seen] == [[10] * 3, [10, 10, 20], [30] * 3, [30, 30, 40], [30, 40, 50]]


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 5), (1, 7, 6), (9, 8, 3)], ids=str)
def test_frame_stack_equals_the_stacks_of_the_store(shape: tuple[int, ...], frames: int) -> None:
    """A policy that plays sees what it saw in training, whichever code stacks the frames."""
    spec, rows = make_spec(shape, "int32"), 2
    store = Columns(spec, rows, unroll_length=4, frame_stack=frames, core_size=0, overlap=1, device=torch.device("cpu"))
    stack, generator, nothing = FrameStack(spec, frames, rows), np.random.default_rng(1), np.zeros(rows, np.int64)
    for t, age in enumerate((0, 1, 0, 1, 1)):
        newest = generator.integers(100, size=(rows, *shape)).astype(np.int32)
        at = store.locate(np.arange(rows), nothing + t, nothing + min(age, frames - 1))
        store.write_frames(at.frame, newest)
        expected = store.stacks(at)
        found = stack.add(torch.from_numpy(newest), torch.tensor([age == 0] * rows))
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert found.shape == (rows, *spec.stacked(frames).observations[0].shape)
        assert torch.equal(found, expected)


# Filming


def film(tmp_path: Path, env: EnvConfig, spec: EnvSpec, **settings: Any) -> Path:
    run_dir = leave_trained(tmp_path / "run", spec, env, steps=1234)
    run_record(RecordConfig(run=str(run_dir), **settings))
    return run_dir / "videos/000000001234"


def frames_of(video: Path, height: int, width: int) -> Any:
    """By ffmpeg itself, frames [n, height, width, 3]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3)


def test_record_films_what_the_environment_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = film(tmp_path, COUNTER, make_spec((2,)), episodes=2, size=60)
    frames = frames_of(out.with_suffix(".mp4"), 20, 32)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), [0, 40, 80, 120, 160, 200] * 2, atol=8)
    assert len(imageio.mimread(out.with_suffix(".gif"))) == 12
    grid = imageio.imread(out.with_suffix(".png"))
    cell = 140 + CAPTION_HEIGHT
    assert grid.shape[:2] == (2 * cell + 4, 4 * 224 + 12)  # six frames of the first episode, enlarged, with captions
    captions = [grid[140:cell, 228 * column : 228 * column + 224] for column in range(4)]
    assert all(caption.max() == 255 and caption.min() < 100 for caption in captions), "ink on white"
    assert not np.array_equal(captions[0], captions[1]), "each has its own step and return"
    assert "after 1,234 steps; returns 5, 5" in capsys.readouterr().out


def test_record_says_how_many_episodes_were_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film(tmp_path, COUNTER, make_spec((2,)), episodes=2, size=60, max_steps=3)
    assert "returns 3 (cut short at 3 steps), 3 (cut short at 3 steps)\n" in capsys.readouterr().out


def test_record_films_observations_that_are_pictures(tmp_path: Path) -> None:
    out = film(tmp_path, SCREEN, SCREEN_SPEC, episodes=1, size=80, out=str(tmp_path / "elsewhere/film"))
    assert not out.parent.exists()
    frames = frames_of(tmp_path / "elsewhere/film.mp4", 80, 80)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), [0, 40, 80, 120, 160, 200], atol=8)


def test_record_of_an_environment_without_pictures_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not render here .*render_mode.*, and its observations are not pict"):
        film(tmp_path, EnvConfig(id=f"{MODULE}:Blind"), make_spec((2,)))


def test_record_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"pip install 'seedrl\[video\]'"):
        film(tmp_path, COUNTER, make_spec((2,)))


@pytest.mark.parametrize("settings", [{"episodes": 0}, {"fps": 0}, {"size": 2}, {"max_steps": 0}])
def test_record_with_settings_that_show_nothing_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        run_record(RecordConfig(run="nowhere", **settings))  # type: ignore[arg-type]


def test_environment_that_ends_its_process_when_it_draws_is_survived() -> None:
    assert why_not_drawn(job_of(EnvConfig(id=f"{MODULE}:ending"), seed=1)) == "the process that tried ended with code 7"


# Pictures


def test_pictures_are_found_among_observations() -> None:
    vector, screen = ArraySpec((4,), "float32"), ArraySpec((3, 84, 84), "uint8")
    assert picture_in(EnvSpec(vector, discrete(2))) is None
    assert picture_in(EnvSpec(screen, discrete(2))) == ""
    assert picture_in(EnvSpec({"a": vector, "b/c": screen}, discrete(2))) == "b/c"
    assert picture_in(EnvSpec(ArraySpec((7, 7, 3), "uint8"), discrete(2))) is None  # cells, not pixels


@pytest.mark.parametrize(
    ("shape", "grey"), [((20, 30), True), ((1, 20, 30), True), ((3, 20, 30), False), ((20, 30, 3), False)]
)
def test_picture_has_three_channels_last(shape: tuple[int, ...], grey: bool) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    picture = as_picture(values)
    assert picture.shape == (20, 30, 3)
    assert (picture[..., 0] == picture[..., 1]).all() == grey


@pytest.mark.parametrize(
    ("before", "after"),
    [((84, 84), (420, 420)), ((400, 600), (400, 600)), ((1001, 1500), (334, 500)), ((21, 15), (462, 330))],
)
def test_frames_are_fitted_by_whole_numbers(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert fitted(np.zeros((*before, 3), np.uint8), 480).shape[:2] == after


def test_thinned_frames_are_evenly_apart() -> None:
    thinned = Thinned(10)
    for number in range(100):
        thinned.add(np.full((2, 2, 3), number, np.uint8))
    assert [int(frame[0, 0, 0]) for frame in thinned.frames] == list(range(0, 100, 16))
    assert [int(frame[0, 0, 0]) for frame in thinned.evenly(3)] == [0, 48, 96]


def test_grid_of_few_frames_has_no_row_too_many() -> None:
    assert grid_of([np.zeros((10, 10, 3), np.uint8)] * (GRID + 1), GRID).shape == (24, 52, 3)


# While a run goes on


class FakeProcess:
    def __init__(self) -> None:
        self.pid = 0  # this very process, to os.setpriority
        self.code: int | None = None
        self.ended = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.ended = True

    def wait(self, timeout: float) -> int:
        return 0


@pytest.fixture
def filming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Videos, list[FakeProcess], FakeClock]:
    monkeypatch.setattr("os.setpriority", lambda *arguments: None)
    run_dir = tmp_path / "it's a run"
    run_dir.mkdir()
    started: list[FakeProcess] = []
    clock = FakeClock()

    def start(*arguments: Any, **options: Any) -> Any:
        assert arguments == ("seedrl", "record", f"run='{tmp_path}/it\\'s a run'")
        started.append(FakeProcess())
        return started[-1]

    return Videos(run_dir, 60.0, start=start, clock=clock), started, clock


def test_videos_are_made_one_at_a_time_once_there_is_a_checkpoint(
    tmp_path: Path, filming: tuple[Videos, list[FakeProcess], FakeClock]
) -> None:
    videos, started, clock = filming
    clock.advance(61)
    videos.write({})
    assert started == []
    (tmp_path / "it's a run/checkpoints/000000000001").mkdir(parents=True)
    videos.write({})
    assert len(started) == 1
    clock.advance(61)
    videos.write({})
    assert len(started) == 1, "the first is still being made"
    started[0].code = 0
    videos.write({})
    assert len(started) == 2
    videos.close({})
    assert started[1].ended


def test_video_that_fails_is_told_with_its_last_words(
    tmp_path: Path, filming: tuple[Videos, list[FakeProcess], FakeClock]
) -> None:
    videos, started, clock = filming
    (tmp_path / "it's a run/checkpoints/000000000001").mkdir(parents=True)
    clock.advance(61)
    videos.write({})
    (tmp_path / "it's a run/logs/video.log").write_text("Traceback\nseedrl record: there are no pictures\n")
    started[0].code = 2
    with pytest.raises(RuntimeError, match="there are no pictures"):
        videos.write({})
    videos.write({})  # and not again
