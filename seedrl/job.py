"""A job in Python: `Job().env("Pong-v5").learner(ranks=2).actors(total=8, per_node=4).build().submit("name")`.

Every call adds the settings that the command line has for the same thing, so `build` gives what `seedrl run` would
compose of them: there is one way to make a RunConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seedrl.commands import compose, conf_directory, launch
from seedrl.config import Engine, Placement, RunConfig
from seedrl.validation import check


@dataclass(frozen=True)
class BuiltJob:
    """Settings that fit together."""

    config: RunConfig
    overrides: tuple[str, ...]  # of `seedrl run`, in Hydra's words

    def submit(self, name: str) -> None:
        """Runs it under this name, in runs/<env>/<name>; returns when it is over."""
        launch([*self.overrides, f"launch.name={name}", f"run_dir='runs/{self.config.env.id}/{name}'"])


class Job:
    """Each call returns a new job; none of them starts anything."""

    def __init__(self, *overrides: str) -> None:
        self._overrides = overrides

    def set(self, *overrides: str, **settings: Any) -> "Job":
        """Anything else: set("algorithm.learning_rate=1e-4", seed=3)."""
        return Job(*self._overrides, *overrides, *(f"{key}={_word(value)}" for key, value in settings.items()))

    def env(self, name: str, **options: Any) -> "Job":
        """A preset of conf/env, or the id of an environment with nothing tuned for it."""
        is_preset = (conf_directory() / "env" / f"{name}.yaml").exists()
        chosen = [f"env={name}"] if is_preset else ["env=any", f"env.id={_word(name)}"]
        return self.set(*chosen, *(f"+env.options.{key}={_word(value)}" for key, value in options.items()))

    def learner(self, ranks: int | None = None, device: str | None = None, **role: Any) -> "Job":
        """`role` is cpus, gpus, memory_gb, env, selector of each rank."""
        return self.set(*_given({"ranks.count": ranks, "device": device}), *_role("learner", role))

    def actors(
        self,
        total: int | None = None,
        envs: int | None = None,
        per_node: int | None = None,
        at_most: int | None = None,
        evaluation: float | None = None,
        **role: Any,
    ) -> "Job":
        settings = {
            "actors.count": total,
            "actors.envs": envs,
            "actors.at_most": at_most,
            "actors.evaluation": evaluation,
            "launch.per_node": per_node,
        }
        job = self.set(*_given(settings), *_role("actor", role))
        return job.place(Placement.per_node.name) if per_node else job

    def place(self, *placements: str) -> "Job":
        """Besides those asked for before."""
        prefix = "launch.placement="
        before = [each for each in self._overrides if each.startswith(prefix)]
        names = [name for each in before for name in each.removeprefix(prefix).strip("[]").split(",")]
        kept = [each for each in self._overrides if each not in before]
        return Job(*kept, f"{prefix}[{','.join([*names, *placements])}]")

    def restarts(self, learner: int | None = None, actors: int | None = None) -> "Job":
        """How many within ten minutes."""
        return self.set(*_given({"max_restarts": learner, "actors.max_restarts": actors}))

    def environment(self, **variables: str) -> "Job":
        """Variables of every process."""
        return self.set(*(f"+launch.env.{key}={_word(value)}" for key, value in variables.items()))

    def on(self, engine: str, **settings: Any) -> "Job":
        """local, torchrun, ray or kubernetes, and settings of `launch`."""
        return self.set(f"launch={Engine[engine].name}", *_given({f"launch.{k}": v for k, v in settings.items()}))

    def build(self) -> BuiltJob:
        """Refuses what cannot work."""
        config = compose("run", self._overrides)
        assert isinstance(config, RunConfig)
        check(config)
        return BuiltJob(config, self._overrides)


def _role(name: str, settings: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            words += [f"+launch.{name}.{key}.{each}={_word(item)}" for each, item in value.items()]
        else:
            words += _given({f"launch.{name}.{key}": value})
    return words


def _given(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_word(value)}" for key, value in settings.items() if value is not None]


def _word(value: Any) -> str:
    """As Hydra's grammar has it."""
    if isinstance(value, str):
        escaped = value.replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
