"""`seedrl record`: records episodes of a trained policy as a video, a GIF and a picture of frames. Changes no run."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envs_server.drawing import rendered, why_not_drawn
from seedrl.config import RecordConfig
from seedrl.errors import ConfigError
from seedrl.specs import Arrays, EnvSpec, names
from seedrl.trained.load import Trained, load_trained
from seedrl.trained.play import Moment, job_of, play
from seedrl.wire.messages import Welcome

Frame = NDArray[np.uint8]  # [height, width, 3]

SMALLEST = 16  # pixels of height and width that make an observation a picture
GIF_FRAMES = 240
GIF_SIDE = CELL_SIDE = 240  # pixels
GRID = 4  # rows and columns of frames
GAP, GAP_GREY = 4, 200  # pixels between them
CAPTION_HEIGHT, CAPTION_SIZE, CAPTION_GREY = 18, 12, 40  # pixels below each frame, of the letters; ink on white


def run_record(config: RecordConfig) -> None:
    if config.episodes < 1 or config.max_steps < 1 or config.fps < 1 or config.size < SMALLEST:
        raise ConfigError(f"episodes, max_steps and fps must be at least 1, and size at least {SMALLEST}")
    imageio = _imageio()
    torch.set_num_threads(1)  # one row at a time is no work for more
    trained = load_trained(config.run, config.checkpoint)
    out = Path(config.out) if config.out else trained.run_dir / "videos" / f"{trained.env_steps:012d}"
    job = drawn(trained, config.seed)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        episodes = Film(config, out, imageio).record(trained, job)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}; give another out=") from error
    shown = ", ".join(f"{each.total:,.4g}{f' (cut short at {each.steps:,} steps)' * each.is_cut}" for each in episodes)
    print(f"{out}.mp4, .gif and .png: {trained.config.env.id} after {trained.env_steps:,} steps; returns {shown}")


def drawn(trained: Trained, seed: int) -> Welcome:
    """Describe the environment to record: one that renders, or the one of training if its observations are pictures."""
    job = job_of(trained.config.env, seed)
    reason = why_not_drawn(job)
    if reason and picture_in(trained.spec) is None:
        raise ConfigError(
            f"{job.env_id} does not render here ({reason}), and its observations are not pictures: {trained.spec}"
        )
    return job if reason else rendered(job)


def _imageio() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 it contains the program that writes mp4
    except ImportError as error:
        raise ConfigError(f"videos need more packages: pip install 'seedrl[video]' ({error})") from error
    return imageio


@dataclass
class Played:
    """An episode so far."""

    total: float = 0.0  # its return
    steps: int = 0
    is_cut: bool = False

    def add(self, moment: Moment) -> None:
        self.total += moment.reward
        self.steps, self.is_cut = moment.step, moment.is_cut

    @property
    def caption(self) -> str:
        return f"step {self.steps:,} · return {self.total:,.4g}"


@dataclass
class Film:
    """Writes frames: all to the mp4, some to the GIF, and a few of the first episode to the grid."""

    config: RecordConfig
    out: Path
    imageio: Any

    def record(self, trained: Trained, job: Welcome) -> list[Played]:
        """Play and write; return the episodes."""
        config = self.config
        episodes = [Played() for _ in range(config.episodes)]
        gif, grid = Thinned(GIF_FRAMES), Thinned(4 * GRID * GRID)
        moments = play(trained, job, config.episodes, config.max_steps)
        with ExitStack() as until_the_end:
            writer = None
            for moment in moments:
                played = episodes[moment.episode]
                played.add(moment)
                frame = fitted(frame_of(moment, trained.spec), config.size)
                if writer is None:  # ffmpeg starts with the first frame
                    writer = until_the_end.enter_context(self._video())
                writer.append_data(frame)
                gif.add(fitted(frame, GIF_SIDE))
                if moment.episode == 0:
                    grid.add(captioned(fitted(frame, CELL_SIDE), played.caption))
        self._write_gif(gif)
        self.imageio.imwrite(self._path(".png"), grid_of(grid.evenly(GRID * GRID), GRID))
        return episodes

    def _video(self) -> Any:
        return self.imageio.get_writer(
            self._path(".mp4"), fps=self.config.fps, codec="libx264", quality=8, macro_block_size=2
        )

    def _write_gif(self, gif: "Thinned") -> None:
        """Write a GIF as long as the video, with fewer frames."""
        milliseconds = max(20.0, 1000 * gif.stride / self.config.fps)  # browsers replace shorter times by a longer one
        self.imageio.mimwrite(self._path(".gif"), gif.frames, duration=milliseconds, loop=0)

    def _path(self, suffix: str) -> Path:
        return self.out.with_name(self.out.name + suffix)


@dataclass
class Thinned:
    """Keeps at most `limit` of any number of frames, evenly spaced: every `stride`-th."""

    limit: int
    frames: list[Frame] = field(default_factory=list)
    stride: int = 1
    _seen: int = 0

    def add(self, frame: Frame) -> None:
        if self._seen % self.stride == 0:
            self.frames.append(frame)
        self._seen += 1
        if len(self.frames) > self.limit:
            self.frames, self.stride = self.frames[::2], 2 * self.stride

    def evenly(self, count: int) -> list[Frame]:
        """Return up to `count` of the frames, including the first and the last."""
        chosen = np.linspace(0, len(self.frames) - 1, min(count, len(self.frames))).round().astype(int)
        return [self.frames[index] for index in chosen]


def frame_of(moment: Moment, spec: EnvSpec) -> Frame:
    """Return what the environment rendered, or else an observation that is a picture."""
    if moment.frame is not None:
        return np.ascontiguousarray(moment.frame[..., :3], np.uint8)
    name = picture_in(spec)
    assert name is not None
    return as_picture(leaf_of(moment.observation, name)[0])


def leaf_of(observation: Arrays, name: str) -> NDArray[Any]:
    return observation[name] if isinstance(observation, dict) else observation


def picture_in(spec: EnvSpec) -> str | None:
    """Return the name of the first observation that is a picture of bytes, with or without an axis of channels."""
    for name, leaf in zip(names(spec.observation), spec.observations, strict=True):
        sides = [size for size in leaf.shape if size >= SMALLEST]
        if leaf.dtype == "uint8" and not leaf.values and len(sides) == 2 and len(leaf.shape) in (2, 3):
            return name
    return None


def as_picture(values: NDArray[Any]) -> Frame:
    """Convert to three channels, last; unless there are three, the last channel is shown in grey."""
    if values.ndim == 3 and values.shape[0] < SMALLEST:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 3 and values.shape[-1] == 3:
        return np.ascontiguousarray(values)
    grey = values[..., -1] if values.ndim == 3 else values
    return np.repeat(grey[..., np.newaxis], 3, axis=-1)


def fitted(frame: Frame, side: int) -> Frame:
    """Scale by a whole number so that the longer side is about `side`; both sides are even, as mp4 requires."""
    longer = max(frame.shape[:2])
    if longer > side:
        step = round(longer / side) or 1
        frame = frame[::step, ::step]
    elif side // longer > 1:
        frame = frame.repeat(side // longer, axis=0).repeat(side // longer, axis=1)
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def captioned(frame: Frame, text: str) -> Frame:
    """Return the frame with a line of text below it."""
    from PIL import Image, ImageDraw, ImageFont

    strip = Image.new("L", (frame.shape[1], CAPTION_HEIGHT), 255)
    ImageDraw.Draw(strip).text((4, 2), text, fill=CAPTION_GREY, font=ImageFont.load_default(CAPTION_SIZE))
    return np.concatenate([frame, np.repeat(np.asarray(strip)[..., np.newaxis], 3, axis=-1)])


def grid_of(frames: list[Frame], columns: int) -> Frame:
    """Arrange the frames in reading order, with grey between them."""
    height, width = frames[0].shape[:2]
    rows = -(-len(frames) // columns)
    grid = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), GAP_GREY, np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // columns * (height + GAP), number % columns * (width + GAP)
        grid[top : top + height, left : left + width] = frame
    return grid
