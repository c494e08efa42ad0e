"""A job on a Ray cluster."""

from collections.abc import Sequence

from seedrl.config import RunConfig


def run_on_ray(config: RunConfig, overrides: Sequence[str]) -> None:
    raise NotImplementedError
