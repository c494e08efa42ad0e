"""A job described and submitted in Python instead of on the command line.

    handle = Job().env("Pong-v5").learner(ranks=2).actors(total=8, per_node=4).on("ray").build().submit("name")
    summary = handle.wait()

Every call adds the overrides that the command line has for the same settings, so `build` returns what `seedrl run`
would compose from them: there is one way to make a RunConfig.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.commandline.main import compose
from seedrl.commandline.settings import conf_directory
from seedrl.config import Engine, Placement, RunConfig
from seedrl.errors import ConfigError
from seedrl.job_handle import SubmittedJob
from seedrl.launching.engines import check_launch
from seedrl.launching.overrides import override
from seedrl.run.directory import RunDirectory, directory_name


@dataclass(frozen=True)
class BuiltJob:
    """Settings that have been checked and can be submitted."""

    config: RunConfig
    overrides: tuple[str, ...]  # those of `seedrl run` that give this config

    def submit(self, name: str) -> SubmittedJob:
        """Start the job under this name, in runs/<env>/<name>, and return a handle on it. An existing run is resumed.

        Raises an error for a job that could not be started, or a run that cannot be resumed with these settings.
        """
        directory = Path("runs") / directory_name(self.config.env.id) / name
        overrides = [*self.overrides, override("launch.name", name), override("run_dir", str(directory))]
        config = compose("run", overrides)
        check_launch(config, overrides)
        RunDirectory.prepare(config)
        return SubmittedJob.start(directory.absolute(), overrides)


class Job:
    """A job that is being described. Each call returns a new one; none of them starts anything."""

    def __init__(self, *overrides: str) -> None:
        self._overrides = overrides

    def set(self, *overrides: str, **settings: Any) -> "Job":
        """Add any other setting: set("algorithm.learning_rate=1e-4", seed=3)."""
        return Job(*self._overrides, *overrides, *_overrides(settings))

    def env(self, name: str, **options: Any) -> "Job":
        """Choose a preset of conf/env, or an environment by its id with nothing tuned for it; `options` are its own."""
        is_preset = (conf_directory() / "env" / f"{name}.yaml").exists()
        chosen = [f"env={name}"] if is_preset else ["env=any", override("env.id", name)]
        return self.set(*chosen, **{"env.options": options})

    def learner(self, ranks: int | None = None, device: str | None = None, **role: Any) -> "Job":
        """Describe the learner; `role` is what each rank needs: cpus, gpus, memory_gb, env, selector."""
        return self.set(**{"ranks.count": ranks, "device": device, **_below("launch.learner", role)})

    def actors(
        self,
        total: int | None = None,
        envs: int | None = None,
        per_node: int | None = None,
        at_most: int | None = None,
        evaluation: float | None = None,
        **role: Any,
    ) -> "Job":
        """Describe the actors; `role` is what each needs: cpus, gpus, memory_gb, env, selector."""
        settings = {
            "actors.count": total,
            "actors.envs": envs,
            "actors.at_most": at_most,
            "actors.evaluation": evaluation,
            "launch.per_node": per_node,
            **_below("launch.actor", role),
        }
        return self.set(**settings)

    def place(self, *placements: str) -> "Job":
        """Say where actors go: collocate, spread or both."""
        return self.set(f"launch.placement=[{','.join(_named(Placement, each) for each in placements)}]")

    def restarts(self, learner: int | None = None, actors: int | None = None) -> "Job":
        """Limit the restarts within ten minutes."""
        return self.set(**{"max_restarts": learner, "actors.max_restarts": actors})

    def environment(self, **variables: str) -> "Job":
        """Set environment variables of every process."""
        return self.set(**{"launch.env": variables})

    def on(self, engine: str, **settings: Any) -> "Job":
        """Choose the engine, which is local, torchrun or ray, and other settings of `launch`."""
        return self.set(f"launch={_named(Engine, engine)}", **_below("launch", settings))

    def build(self) -> BuiltJob:
        """Compose and check the settings. Raises ConfigError for a job that could not be submitted."""
        config = compose("run", self._overrides)
        check_launch(config, self._overrides)
        return BuiltJob(config, self._overrides)


def _below(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}.{key}": value for key, value in settings.items()}


def _overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield an override for each setting that is not None. The keys of a mapping may be new ones, hence `++`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _overrides(_below(key, value), prefix="++")
        elif value is not None:
            yield f"{prefix}{override(key, value)}"


def _named(kind: type[Engine | Placement], name: str) -> str:
    if name not in kind.__members__:
        raise ConfigError(f"{name!r} is none of {', '.join(kind.__members__)}")
    return name
