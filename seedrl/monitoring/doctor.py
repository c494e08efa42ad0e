"""`seedrl doctor`: problems of a run before it starts, and the bottleneck of one that runs.

Each check is a function that yields its findings; it knows nothing of the other checks.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from seedrl.config import DoctorConfig, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.connection import learner_status
from seedrl.monitoring.endpoint import AUTO, Endpoint, address_of, bound
from seedrl.monitoring.units import mebibytes
from seedrl.plugins import is_own
from seedrl.sizes import available_cores, group_size, torch_threads
from seedrl.specs import EnvSpec
from seedrl.tracebacks import report
from seedrl.validation import check
from seedrl.wire.security import exposures

LITTLE_DISK = 2**30


class Finding(NamedTuple):
    is_good: bool
    words: str
    is_fatal: bool = True  # only if it is not good


def run_doctor(config: DoctorConfig) -> None:
    if config.learner or config.run:
        verdict = learner_status(config).verdict
        print(f"bottleneck: {verdict.bottleneck}\n  {verdict.evidence}\n  {verdict.change}")
        return
    findings = []
    for finding in examine(config):
        findings.append(finding)
        print(f"{'✓' if finding.is_good else '✗' if finding.is_fatal else '!'} {finding.words}", flush=True)
    wrong = sum(finding.is_fatal and not finding.is_good for finding in findings)
    if wrong:
        raise ConfigError(f"{wrong} of {len(findings)} checks failed; this run would not work")
    print("ready: seedrl run with these settings should work")


def examine(config: LearnerConfig) -> Iterator[Finding]:
    """Yield the findings of all checks; later checks build on earlier ones."""
    yield from versions()
    yield from _guarded("settings", lambda: _settings(config))
    yield from _guarded("generated code", generated_code)
    yield from _guarded("security", lambda: security(config))
    yield from _guarded("listen", lambda: ports(config))
    yield from _guarded("device", lambda: device(config))
    specs: list[EnvSpec] = []
    yield from _guarded("environment", lambda: environment(config, specs))
    if specs:
        yield from _guarded("messages", lambda: messages(config, specs[0]))
        yield from _guarded("model and memory", lambda: memory(config, specs[0]))
    yield from _guarded("disk", lambda: disk(config))


def versions() -> Iterator[Finding]:
    """Check that all packages that pyproject.toml requires of a learner and an actor are installed."""
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for line in requires("seedrl") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"](\w+)['\"]", line)
        if name is None or (extra and extra[1] not in ("learner", "actor")):
            continue
        try:
            found.append(f"{name[0]} {version(name[0])}")
        except PackageNotFoundError:
            missing.append(name[0])
    if missing:
        yield Finding(False, f"packages: {', '.join(missing)} not installed; pip install 'seedrl[all]'")
    yield Finding(True, f"packages: {', '.join(found)}")


def generated_code() -> Iterator[Finding]:
    from seedrl.wire.channel import METHODS

    yield Finding(True, f"generated code: fits protobuf {version('protobuf')}; {', '.join(METHODS)}")


def security(config: LearnerConfig) -> Iterator[Finding]:
    """Check that the files match, are private, and protect what can be reached from other machines."""
    from seedrl.wire.tls import server_credentials
    from seedrl.wire.tokens import Tokens, open_to_others

    has_tls, has_token = bool(config.security.certificate_file), bool(Tokens(config.security))
    if has_tls:
        server_credentials(config.security)
    parts = ["TLS"] * has_tls + ["certificates of actors"] * bool(config.security.ca_file) + ["tokens"] * has_token
    yield Finding(True, f"security: {', '.join(parts) or 'neither TLS nor token'}")
    yield from (
        Finding(False, f"security: {name} can be read by others", False) for name in open_to_others(config.security)
    )
    yield from (Finding(False, f"security: {words}", is_fatal=False) for words in exposures(config))


def ports(config: LearnerConfig) -> Iterator[Finding]:
    listen = config.listen
    if not listen:
        yield Finding(True, "listen: a private unix socket")
    elif listen.startswith("unix:"):
        folder = Path(listen.removeprefix("unix:")).absolute().parent
        is_writable = os.access(folder, os.W_OK)
        yield Finding(is_writable, f"listen: {listen}" + ("" if is_writable else f"; {folder} cannot be written to"))
    else:
        yield _can_bind(listen)
    if config.metrics:
        endpoint = Endpoint(config.metrics, {})
        address = endpoint.start()
        endpoint.stop()
        is_other = config.metrics == AUTO and not address.endswith(":9464")
        words = f"metrics: {address} is free" + (", 127.0.0.1:9464 is taken by another run" if is_other else "")
        yield Finding(not is_other, words, is_fatal=False)


def device(config: LearnerConfig) -> Iterator[Finding]:
    from seedrl.device import choose_device, is_accelerator
    from seedrl.roles.device_trial import described, trials

    cores, threads = available_cores(), torch_threads(config)
    chosen = choose_device(config.device)
    yield Finding(True, f"device: {chosen}, {threads} torch threads each for inference and training, {cores} cores")
    if 2 * threads > cores > 1 and chosen.type == "cpu":
        yield Finding(False, f"threads: inference and training with {threads} each share {cores} cores", is_fatal=False)
    if is_accelerator(chosen):
        yield Finding(True, f"device: {described(chosen)}")
        yield from (Finding(trial.is_passed, f"device: {trial.words}") for trial in trials(chosen))


def environment(config: LearnerConfig, specs: list[EnvSpec]) -> Iterator[Finding]:
    """Create the environment and reset it once, ROM included; append its spaces to `specs`."""
    from envs_server.pool import make_pool
    from seedrl.wire.messages import Welcome

    env = config.env
    if is_own(env.id):
        yield Finding(True, f"environment: {env.id} is provided by the actors; it cannot be checked from here")
        return
    envs, wrappers = 2 * env.players, list(env.wrappers)
    job = Welcome(1, env.id, dict(env.options), envs, envs, 1, wrappers=wrappers, players=env.players)
    pool = make_pool(job, threads=1)
    try:
        rows = pool.recv()
    finally:
        pool.close()
    specs.append(pool.spec)
    yield Finding(len(rows.env_id) >= 2, f"environment: {env.id} can be created and reset; {pool.spec}")


def messages(config: LearnerConfig, spec: EnvSpec) -> Iterator[Finding]:
    from seedrl.serving.sessions import check_message_size
    from seedrl.wire.memory import this_host
    from seedrl.wire.messages import MAX_MESSAGE_BYTES

    check_message_size(config, spec)
    size = group_size(config) * spec.row_bytes
    where = "in shared memory on this machine" if config.serving.shared_memory and this_host() else "in messages"
    yield Finding(
        True, f"messages: {size / 1024:,.0f} KiB a request, {where}; {MAX_MESSAGE_BYTES // 2**20} MiB allowed"
    )


def memory(config: LearnerConfig, spec: EnvSpec) -> Iterator[Finding]:
    """Check that weights and store fit the device, and checkpoints the disk."""
    from seedrl.actions import Actions
    from seedrl.algorithms.build import build_algorithm
    from seedrl.algorithms.neutral import resolve
    from seedrl.device import choose_device, is_accelerator
    from seedrl.models.base import core_size_of
    from seedrl.models.build import build_run_model
    from seedrl.roles.device_trial import memory_taken
    from seedrl.run.budget import budget_of, checkpoint_bytes, free_bytes, saved_unrolls
    from seedrl.store import StoreSizes

    config, device = resolve(config, spec), choose_device(config.device)
    model = build_run_model(config, spec)
    algorithm = build_algorithm(config.algorithm, Actions(spec, config.model.squash), model)
    budget, free = budget_of(config, spec, model, algorithm), free_bytes(device)
    is_enough = free is None or budget.on(device) <= free
    yield Finding(is_enough, f"memory: {budget}" + (f", {mebibytes(free)} free" if free is not None else ""))
    if is_accelerator(device):
        yield Finding(True, f"memory: {memory_taken(config, spec, device)}")
    unrolls = saved_unrolls(config, spec, StoreSizes.of(config, core_size_of(model), algorithm.overlap))
    saved = (
        checkpoint_bytes(config, model, algorithm) * (config.checkpoint.keep + 1) + 2 * unrolls
    )  # the newest one, and the next
    yield Finding(saved < shutil.disk_usage(_folder(config)).free, f"checkpoints: {mebibytes(saved)} on disk")


def _folder(config: LearnerConfig) -> Path:
    """Return the part of the run directory's path that exists already."""
    folder = Path(config.run_dir or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def disk(config: LearnerConfig) -> Iterator[Finding]:
    folder = _folder(config)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(False, f"disk: {folder} cannot be written to ({error.strerror}); give another run_dir")
    free = shutil.disk_usage(folder).free
    yield Finding(free > LITTLE_DISK, f"disk: {mebibytes(free)} free in {folder}", is_fatal=False)


def _settings(config: LearnerConfig) -> Iterator[Finding]:
    check(config)
    yield Finding(True, "settings: they are consistent")


def _can_bind(listen: str) -> Finding:
    try:
        with bound(*address_of(listen, "listen")):
            return Finding(True, f"listen: {listen} is free")
    except OSError as error:
        return Finding(False, f"listen: {listen} cannot be bound: {error.strerror or error}")


def _guarded(name: str, checks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Turn an error of a check into a finding."""
    try:
        yield from checks()
    except Exception as error:
        yield Finding(False, f"{name}: {report(error)}")
