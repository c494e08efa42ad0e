"""`seedrl check`: examines an environment, and the user's own model, algorithm and callbacks, before a run.

The environment is examined in `envs_server/examination.py`. Knows nothing of actors and learners; torch is imported
only for code of one's own that needs it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial

from envs_server.examination import Finding, examine, guarded
from seedrl.config import CheckConfig, LearnerConfig
from seedrl.errors import ConfigError, require
from seedrl.plugins import is_import_path, is_own, load
from seedrl.specs import EnvSpec
from seedrl.wire.messages import Welcome

UNROLL_LENGTH, BATCH = 5, 4  # of the train batch that a loss is tried on


def run_check(config: CheckConfig) -> None:
    """Print the findings; raise ConfigError if any is an error."""
    require(config.steps > 0, f"steps={config.steps} must be positive")
    found = []
    for finding in findings(config):
        found.append(finding)
        if not config.json:
            print(finding, flush=True)
    counts = Counter(finding.level for finding in found)
    if config.json:
        print(json.dumps({"env": config.env.id, "findings": [finding._asdict() for finding in found]}, indent=2))
    if counts["error"]:
        raise ConfigError(f"{_counted(counts['error'], 'error')} and {_counted(counts['warning'], 'warning')} found")
    if not config.json:
        print(f"no error and {_counted(counts['warning'], 'warning')} found")


def findings(config: CheckConfig) -> Iterator[Finding]:
    """Yield all findings; the model is examined if the spaces are known."""
    env, specs = config.env, list[EnvSpec]()
    if is_own(env.id):
        yield Finding("note", "environment", f"{env.id} is brought by the actors; it cannot be examined from here")
    else:
        wrappers, players = list(env.wrappers), env.players
        job = Welcome(0, env.id, dict(env.options), players, players, config.seed, wrappers=wrappers, players=players)
        yield from examine(job, config.steps, specs)
    for path in config.callbacks:
        yield from guarded("callbacks", partial(_callback, path))
    has_own_code = any(map(is_import_path, (config.model.name, config.algorithm.name)))
    for spec in specs if has_own_code else []:
        yield from guarded("model", partial(_model_and_loss, config, spec))


def _callback(path: str) -> Iterator[Finding]:
    load("callbacks", path)
    yield Finding("ok", "callbacks", f"{path} can be imported")


def _model_and_loss(config: LearnerConfig, spec: EnvSpec) -> Iterator[Finding]:
    """Build the model, which checks its outputs, and take the loss of one train batch."""
    from seedrl.actions import Actions
    from seedrl.algorithms.build import build_algorithm
    from seedrl.algorithms.check import first_loss, sample_unrolls
    from seedrl.algorithms.neutral import resolve
    from seedrl.models.build import build_run_model

    config = resolve(config, spec)
    model = build_run_model(config, spec)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield Finding("ok", "model", f"{config.model.name} has {parameters:,} parameters, and outputs that fit the spaces")
    actions = Actions(spec, config.model.squash)
    algorithm = build_algorithm(config.algorithm, actions, model)
    unrolls = sample_unrolls(spec.stacked(config.env.frame_stack), actions, model, UNROLL_LENGTH, BATCH)
    loss = first_loss(algorithm, unrolls, model, f"algorithm.name={config.algorithm.name}")
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if without:
        yield Finding("warning", "algorithm", f"the loss has no gradient for {', '.join(without)}: they never change")
    yield Finding("ok", "algorithm", f"{config.algorithm.name} has a loss of {loss.total.item():.3g}, with gradients")


def _counted(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
