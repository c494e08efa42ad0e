"""Strangers and friends at a learner's port: tokens, TLS and client certificates over real gRPC; what leaks out."""

import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from seedrl.config import TOKEN_VARIABLE, CertsConfig, Display, SecurityConfig, StatusConfig
from seedrl.errors import LearnerLost, Unauthenticated
from seedrl.monitoring.connection import learner_status
from seedrl.serving import protocol, server
from seedrl.serving.guard import REFUSAL
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.certificates import run_certs
from seedrl.wire.channel import SERVICE, Link
from tests.certificates import TOKEN, Certificates
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands
from tests.integration.support import RawActor, RunningLearner
from tests.integration.waiting import DEADLINE, eventually, free_address

ROOT = Path(__file__).parents[2]
METHODS = (
    f"/{SERVICE}/Stream",
    f"/{SERVICE}/Status",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/there.is.no/Such",
)
OLD, NEW = "old-token-0123456789", "new-token-0123456789"


@pytest.fixture(autouse=True)
def _no_token_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def outcome(channel: Any, method: str, metadata: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends that says nothing and waits to be told."""
    silence: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_stream(method)(iter(silence.get, None), metadata=metadata, timeout=DEADLINE)
    try:
        code = call.code()
    finally:
        silence.put(None)
    return code, call.details()


def write(path: str, *tokens: str) -> None:
    """Replace the file in one operation, as a rotation should."""
    new = Path(f"{path}.new")
    new.write_text("\n".join(tokens))
    new.chmod(0o600)
    new.replace(path)


# Tokens.


def test_call_without_a_valid_token_is_refused_whatever_it_calls_before_anything_is_made_for_it(
    start_learner: StartLearner, certificates: Certificates
) -> None:
    """B9: by one sentence that tells nothing, without waiting for a message."""
    learner = start_learner(security=SecurityConfig(token_file=certificates.token))
    shown = [(), bearer(""), bearer("wrong-token-0123456789"), bearer(TOKEN[:-1]), (("authorization", TOKEN),)]
    with grpc.insecure_channel(learner.address) as channel:
        seen = {outcome(channel, method, metadata) for method in METHODS for metadata in shown}
    assert seen == {(grpc.StatusCode.UNAUTHENTICATED, str(REFUSAL))}
    assert learner.service.serving.sessions_refused["unauthenticated"] == len(METHODS) * len(shown)
    assert learner.service.inference.sessions.slots_taken == 0
    assert not learner.service.inference.sessions.open
    assert not learner.service.inference.protocol.connections


def test_call_with_a_valid_token_is_answered_by_every_service(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates
) -> None:
    """B9"""
    security = SecurityConfig(token_file=certificates.token)
    learner = start_learner(security=security)
    start_actor(learner.address, security=security)
    learner.steps_on()
    assert learner_status(StatusConfig(learner=learner.address, security=security)).state == "running"
    with grpc.insecure_channel(learner.address) as channel:
        check = channel.unary_unary(METHODS[2], response_deserializer=health_pb2.HealthCheckResponse.FromString)
        assert check(b"", metadata=bearer(TOKEN), timeout=DEADLINE).status
        assert outcome(channel, METHODS[-1], bearer(TOKEN))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert learner.service.serving.sessions_refused["unauthenticated"] == 0


def test_actor_with_a_wrong_token_ends_at_once_with_code_six(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates, tmp_path: Path
) -> None:
    """B9: trying again would not help."""
    learner = start_learner(security=SecurityConfig(token_file=certificates.token))
    write(str(tmp_path / "wrong"), OLD)
    actor = start_actor(learner.address, security=SecurityConfig(token_file=str(tmp_path / "wrong")))
    with pytest.raises(Unauthenticated, match=r"refused this call \(UNAUTHENTICATED\).*security.token_file") as raised:
        actor.join()
    assert raised.value.exit_code == 6
    assert OLD not in "".join([str(raised.value), *actor.said])
    assert learner.service.serving.sessions_refused["unauthenticated"] == 1
    with pytest.raises(Unauthenticated):
        learner_status(StatusConfig(learner=learner.address))


def test_token_rotated_without_a_restart_lets_old_and_new_overlap(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    """B9: and one that was taken out of the file has expired; a session that was let in goes on."""
    ours, theirs = str(tmp_path / "learner-token"), str(tmp_path / "actor-token")
    write(ours, OLD)
    write(theirs, OLD)
    learner = start_learner(security=SecurityConfig(token_file=ours))
    actor = start_actor(learner.address, security=SecurityConfig(token_file=theirs))
    learner.steps_on()
    with grpc.insecure_channel(learner.address) as channel:

        def is_let_in(token: str) -> bool:
            return outcome(channel, METHODS[-1], bearer(token))[0] is not grpc.StatusCode.UNAUTHENTICATED

        assert [is_let_in(OLD), is_let_in(NEW)] == [True, False]
        write(ours, NEW, OLD)
        assert [is_let_in(OLD), is_let_in(NEW)] == [True, True]
        write(theirs, NEW)
        write(ours, NEW)
        assert [is_let_in(OLD), is_let_in(NEW)] == [False, True]
    learner.steps_on()
    assert len(actor.pools) == 1
    actor.actor._session._call.cancel()  # its next session shows the new token
    eventually(lambda: len(actor.pools) == 2)
    learner.steps_on()


# TLS.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_actor_and_status_with_certificates_and_token_are_served(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates, host: str
) -> None:
    """B10: TLS with certificates of both ends, by name and by address."""
    learner = start_learner(security=certificates.learner)
    address = f"{host}:{learner.address.rpartition(':')[2]}"
    start_actor(address, security=certificates.actor)
    learner.steps_on()
    assert len(learner_status(StatusConfig(learner=address, security=certificates.actor)).actors) == 1


def test_actor_without_a_certificate_is_served_by_a_learner_that_asks_for_none(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates
) -> None:
    """B10"""
    learner = start_learner(security=replace(certificates.learner, ca_file=""))
    start_actor(learner.address, security=replace(certificates.actor, certificate_file="", key_file=""))
    learner.steps_on()


def misfits(certificates: Certificates) -> dict[str, tuple[SecurityConfig, SecurityConfig]]:
    """Settings of a learner and of an actor that must not get on, by the words the actor has to end with."""
    c = certificates
    own, nothing, token = c.learner, SecurityConfig(token_file=c.token), c.token

    def learner(pair: SecurityConfig) -> SecurityConfig:
        return replace(pair, token_file=token)

    def actor(pair: SecurityConfig, ca: str = c.ca) -> SecurityConfig:
        return replace(pair, ca_file=ca, token_file=token)

    return {
        "its certificate is refused: certificate has expired": (learner(c.expired_server), actor(c.client)),
        "its certificate is refused: .*(signature|issuer)": (learner(c.server), actor(c.client, c.other_ca)),
        "its certificate is refused: IP address mismatch": (learner(c.elsewhere), actor(c.client)),
        "it asks for a certificate": (own, actor(SecurityConfig())),
        "it refuses security.certificate_file=.*: certificate has expired": (own, actor(c.expired_client)),
        "it refuses security.certificate_file=.*": (own, actor(c.foreign_client)),
        "it does not use TLS": (nothing, actor(c.client)),
        "it uses TLS: give security.ca_file": (learner(c.server), nothing),
        "it uses TLS": (own, nothing),
    }


def test_ends_that_do_not_trust_each_other_do_not_talk_and_the_actor_ends_naming_the_cause(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates, tmp_path: Path
) -> None:
    """B10: expired, another CA, another host, no certificate, and TLS at one end only."""
    for number, (cause, (learners, actors)) in enumerate(misfits(certificates).items()):
        learner = start_learner(security=learners, run_dir=str(tmp_path / f"run-{number}"))
        actor = start_actor(learner.address, security=actors)
        with pytest.raises(Unauthenticated, match=rf"no connection to the learner at {learner.address}: {cause}"):
            actor.join()
        with pytest.raises(Unauthenticated, match=cause):
            learner_status(StatusConfig(learner=learner.address, security=actors))
        assert learner.service.serving.sessions_joined == 0
        assert actor.said == []
        learner.stop()


def test_learner_with_tls_that_is_down_is_waited_for_and_found_again_after_a_restart(
    start_learner: StartLearner, start_actor: StartActor, certificates: Certificates
) -> None:
    """B10: only what cannot get better ends an actor."""
    address = free_address()
    actor = start_actor(address, security=certificates.actor)
    eventually(lambda: actor.says("trying again"))
    for sessions in (1, 2):
        learner = start_learner(listen=address, security=certificates.learner)
        eventually(lambda sessions=sessions: len(actor.pools) == sessions)
        learner.steps_on()
        learner.stop()
    with pytest.raises(LearnerLost):
        learner_status(StatusConfig(learner=address, security=certificates.actor))


def test_certs_prints_command_lines_that_work(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B10"""
    run_certs(CertsConfig(out=str(tmp_path / "certs")))
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  seedrl")]
    found = {words[1]: dict(re.findall(r"security\.(\w+)=(\S+)", " ".join(words))) for words in lines}
    learner = start_learner(security=SecurityConfig(**found["learner"]))
    start_actor(learner.address, security=SecurityConfig(**found["actor"]))
    learner.steps_on()


# Beyond this machine.


def page(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("insecure", [False, True])
def test_learner_that_is_allowed_to_be_insecure_says_so_in_log_and_metrics(
    start_learner: StartLearner, insecure: bool
) -> None:
    """B11"""
    address = free_address()
    listen = address.replace("127.0.0.1", "0.0.0.0") if insecure else address
    security = SecurityConfig(allow_insecure=insecure)
    learner = start_learner(listen=listen, security=security, display=Display.plain, metrics="127.0.0.1:0")
    eventually(lambda: learner.service.monitor.address)
    assert f"seedrl_insecure {float(insecure)}" in page(learner.service.monitor.address)
    assert (f"INSECURE, as was allowed: listen={listen}" in learner.said) is insecure


def test_learner_whose_secrets_others_may_read_says_so_and_never_what_they_are(
    start_learner: StartLearner, tmp_path: Path
) -> None:
    """B9"""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    learner = start_learner(security=SecurityConfig(token_file=str(path)), display=Display.plain)
    with grpc.insecure_channel(learner.address) as channel:
        outcome(channel, METHODS[0], ())
    learner.stop()
    assert f"other users of this machine may read {path}" in learner.said
    assert "refused ipv4:127.0.0.1:" in learner.said
    assert TOKEN not in learner.said


@pytest.mark.parametrize(
    "command",
    [
        ("learner", "listen=0.0.0.0:0"),
        ("learner", "metrics=0.0.0.0:0"),
        ("actor", "learner=10.0.0.1:1"),
        ("status", "learner=10.0.0.1:1"),
    ],
)
def test_command_beyond_this_machine_without_protection_ends_with_code_two(
    commands: Commands, command: tuple[str, ...]
) -> None:
    """B11"""
    code, out, err = commands.run(*command)
    assert (code, out) == (2, "")
    assert command[1] in err
    assert "security.allow_insecure=true" in err


@pytest.fixture(scope="module")
def protected(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    """A whole run with everything on, which welcomes other actors; its address and run directory."""
    with contextlib.closing(Commands(tmp_path_factory.mktemp("protected"))) as commands:
        address, run_dir = free_address(), commands.directory / "run"
        settings = [f"security.{name}={value}" for name, value in vars(certificates.learner).items() if value]
        settings += ["actors.envs=16", "algorithm.batch_size=8", "checkpoint.seconds=0.1", "display=plain"]
        settings += ["stop.return_mean_100=null", "stop.env_steps=1_000_000_000"]
        process = commands.start("run", f"listen={address}", f"run_dir={run_dir}", *settings)
        for made in ("checkpoints/[0-9]*", "metrics.jsonl"):
            eventually(lambda made=made: list(run_dir.glob(made)) or not process.is_running)
        yield process, address, run_dir


@pytest.mark.long
def test_run_with_tls_serves_its_own_actors_over_a_private_socket_and_others_over_tls(
    protected: tuple[Any, str, Path], certificates: Certificates, start_actor: StartActor
) -> None:
    """B10"""
    _, address, run_dir = protected
    near = learner_status(StatusConfig(run=str(run_dir), security=SecurityConfig(token_file=certificates.token)))
    assert [actor.name for actor in near.actors] == ["actor-0"]
    assert near.actors[0].peer.startswith("unix:")
    far = learner_status(StatusConfig(learner=address, security=certificates.actor))
    assert far.env == near.env
    with pytest.raises(Unauthenticated):
        learner_status(StatusConfig(run=str(run_dir)))


@pytest.mark.long
def test_run_with_a_token_shows_it_nowhere(protected: tuple[Any, str, Path]) -> None:
    """B9: not in `ps`, the log, metrics, pages, or any file of the run."""
    process, _, run_dir = protected
    family = process.children()
    assert len(family) == 2
    assert TOKEN not in " ".join(family.values())
    metrics = json.loads((run_dir / "context.json").read_text())["metrics"]
    for path in ("/metrics", "/status.json", "/history.json", "/"):
        assert TOKEN not in page(metrics, path)
    assert TOKEN not in process.out + process.err
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "actor-0.log", "metrics.jsonl"} <= {path.name for path in written}
    assert [path for path in written if TOKEN.encode() in _content(path)] == []


# What nobody can make a learner do or tell.


@pytest.mark.long
def test_training_checkpointing_and_resuming_run_and_unpickle_nothing_that_was_read(tmp_path: Path) -> None:
    """B12: asked of Python itself. What remains happens while modules are imported, and is listed by name."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.integration.audited", str(tmp_path / "run"), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    first, resumed = found["updates"]
    assert 0 < first < resumed
    callers = {event: names for event, names in found["callers"].items() if names}
    assert callers == {"compile": ["typing"]} or callers == {}  # annotations in quotes, which are ours
    assert set(found["while importing"]) <= {
        *(
            "collections",
            "dataclasses",
            "importlib._bootstrap",
            "multiprocessing.sharedctypes",
        ),  # write classes as text
        *("mpmath.ctx_mp_python", "sympy", "sympy.external.importtools"),  # the same; torch imports them
        "torch.distributed.nn.jit.instantiator",  # fills in a template of its own and imports that
    }


@pytest.mark.parametrize("method", ["Stream", "Status"])
def test_internal_error_is_not_told_to_the_peer(
    start_learner: StartLearner, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """B12: it is in the learner's log."""

    def fail(*_: Any) -> Any:
        raise ValueError("secret of the learner")

    monkeypatch.setattr(protocol.SessionProtocol, "_admit", fail)
    monkeypatch.setattr(server, "serialize_status", fail)
    learner = start_learner(display=Display.plain)
    with RawActor(learner.address) as raw:
        if method == "Stream":
            raw.hello()
            seen = raw.status()
        else:
            seen = status_of(learner)
    assert seen == (grpc.StatusCode.INTERNAL, "internal error of the learner")
    eventually(lambda: "secret of the learner" in learner.said)


def status_of(learner: RunningLearner) -> tuple[grpc.StatusCode, str]:
    with Link(learner.address, SecurityConfig()).open() as channel:
        call = channel.unary_unary(METHODS[1], pb.StatusRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as raised:
            call(pb.StatusRequest(), timeout=DEADLINE)
    return raised.value.code(), raised.value.details()


def _content(path: Path) -> bytes:
    """Nothing, if it is gone: old checkpoints make room while the run goes on."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
