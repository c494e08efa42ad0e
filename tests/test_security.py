"""Tests of security: settings refused before anything starts, tokens and their file, certificates made and used."""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.config import TOKEN_VARIABLE, ActorConfig, CertsConfig, LearnerConfig, SecurityConfig
from seedrl.errors import ConfigError, Refused, Unauthenticated
from seedrl.metrics import REFUSALS, ServingMetrics
from seedrl.monitoring.doctor import security
from seedrl.serving.guard import TokenGuard, token_in
from seedrl.serving.refusals import LINES, WINDOW_SECONDS, RefusalLog
from seedrl.validation import check
from seedrl.wire.certificates import FILES, run_certs
from seedrl.wire.channel import Link
from seedrl.wire.codes import code_of, is_worth_retrying
from seedrl.wire.security import check_actor_security, check_redirect, exposures, is_local
from seedrl.wire.tls import client_credentials, server_credentials
from seedrl.wire.tokens import Tokens, open_to_others
from tests.certificates import TOKEN, Certificates
from tests.fakes import FakeClock

OLD, NEW = "old-token-0123456789", "new-token-0123456789"
PAIR = SecurityConfig(certificate_file="server.pem", key_file="server.key")


@pytest.fixture(autouse=True)
def _no_token_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


# Beyond this machine.


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:50051", True),
        ("127.3.2.1:0", True),
        ("[::1]:50051", True),
        ("localhost:50051", True),
        ("unix:/tmp/learner.sock", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        (":50051", False),
        ("10.0.0.1:50051", False),
        ("learner.example:50051", False),
        ("127.0.0.1.example:50051", False),
        ("dns:///localhost:50051", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
    ],
)
def test_address_is_local_only_if_no_other_machine_reaches_it(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("security", "words"),
    [
        (SecurityConfig(), "without TLS .* and a token"),
        (PAIR, "without a token"),
        (SecurityConfig(token_file="token"), "without TLS"),
    ],
)
def test_listen_beyond_this_machine_without_tls_and_token_is_refused(security: SecurityConfig, words: str) -> None:
    """B11"""
    config = LearnerConfig(listen="0.0.0.0:50051", security=security)
    with pytest.raises(ConfigError, match=rf"listen=0\.0\.0\.0:50051.*{words}.*security\.allow_insecure"):
        check(config)
    assert exposures(config)


def test_listen_beyond_this_machine_with_tls_and_token_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """B11"""
    config = LearnerConfig(listen="0.0.0.0:50051", security=PAIR)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    check(config)
    assert exposures(config) == []


def test_listen_beyond_this_machine_is_allowed_by_allow_insecure_and_still_known_to_be_exposed() -> None:
    """B11"""
    config = LearnerConfig(listen="10.0.0.1:50051", security=SecurityConfig(allow_insecure=True))
    check(config)
    assert len(exposures(config)) == 1


def test_metrics_beyond_this_machine_are_refused_even_with_tls_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """B11"""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    config = LearnerConfig(metrics="0.0.0.0:9464", security=PAIR)
    with pytest.raises(ConfigError, match=r"metrics=0\.0\.0\.0:9464"):
        check(config)
    with pytest.raises(ConfigError, match=r"metrics=0\.0\.0\.0:9464"):
        check_actor_security(ActorConfig(learner="localhost:1", metrics="0.0.0.0:9464"))
    config.security.allow_insecure = True
    check(config)


def test_pages_may_be_open_without_the_streams_being_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """B11"""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    pages_only = SecurityConfig(allow_open_pages=True)
    config = LearnerConfig(metrics="0.0.0.0:9464", security=pages_only)
    check(config)
    assert len(exposures(config)) == 1  # still known to be exposed
    check_actor_security(ActorConfig(learner="localhost:1", metrics="0.0.0.0:9464", security=pages_only))
    config.listen = "0.0.0.0:50051"
    with pytest.raises(ConfigError, match=r"listen=0\.0\.0\.0:50051 reaches beyond") as refused:
        check(config)
    assert "metrics=" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"learner=10\.0\.0\.1:1 is beyond this machine"):
        check_actor_security(ActorConfig(learner="10.0.0.1:1", security=pages_only))


@pytest.mark.parametrize("learner", ["127.0.0.1:1", "localhost:1", "unix:/tmp/none.sock"])
def test_token_in_plaintext_is_shown_to_this_machine_only(monkeypatch: pytest.MonkeyPatch, learner: str) -> None:
    """B11"""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert Link(learner, SecurityConfig()).metadata() == (("authorization", f"Bearer {TOKEN}"),)
    with pytest.raises(ConfigError, match=r"learner=10\.0\.0\.1:1 is beyond this machine.*security\.ca_file"):
        Link("10.0.0.1:1", SecurityConfig())
    assert Link("10.0.0.1:1", SecurityConfig(allow_insecure=True)).is_exposed


@pytest.mark.parametrize(
    ("home", "address", "security", "words"),
    [
        ("127.0.0.1:1", "127.0.0.1:2", SecurityConfig(), ""),
        ("unix:/a", "unix:/b", SecurityConfig(), ""),
        ("unix:/a", "127.0.0.1:2", SecurityConfig(), ""),
        ("10.0.0.1:1", "10.0.0.2:1", SecurityConfig(ca_file="ca.pem"), ""),
        ("127.0.0.1:1", "10.0.0.2:1", SecurityConfig(ca_file="ca.pem"), ""),
        ("10.0.0.1:1", "10.0.0.2:1", SecurityConfig(allow_insecure=True), ""),
        ("127.0.0.1:1", "10.0.0.2:1", SecurityConfig(), "is beyond this machine, and without TLS"),
        ("10.0.0.1:1", "127.0.0.1:2", SecurityConfig(ca_file="ca.pem"), "another machine's, and 127.0.0.1:2 is on th"),
        ("10.0.0.1:1", "127.0.0.1:2", SecurityConfig(allow_insecure=True), "another machine's"),
        ("10.0.0.1:1", "unix:/run/any", SecurityConfig(ca_file="ca.pem"), "another machine's"),
        ("127.0.0.1:1", "unix:/run/any", SecurityConfig(ca_file="ca.pem"), "unix:/run/any is a file of this machine"),
    ],
)
def test_redirect_leads_only_where_the_actor_would_show_its_token(
    home: str, address: str, security: SecurityConfig, words: str
) -> None:
    if not words:
        check_redirect(home, address, security)
        return
    with pytest.raises(ConfigError, match=words):
        check_redirect(home, address, security)


def test_ranks_that_nobody_could_be_sent_to_are_refused() -> None:
    config = LearnerConfig(listen="0.0.0.0:50051", security=SecurityConfig(allow_insecure=True))
    check(config)
    config.ranks.count = 2
    with pytest.raises(ConfigError, match=r"listen=0\.0\.0\.0:50051 is not an address .* set ranks.advertise"):
        check(config)
    config.ranks.advertise = "learner-0"
    check(config)


def test_socket_that_is_no_unix_socket_is_refused() -> None:
    """B11: it is served without TLS."""
    with pytest.raises(ConfigError, match=r"socket=0\.0\.0\.0:1 must be unix:PATH"):
        check(LearnerConfig(socket="0.0.0.0:1"))


@pytest.mark.parametrize(
    ("end", "security", "words"),
    [
        ("learner", SecurityConfig(certificate_file="a"), "need each other"),
        ("learner", SecurityConfig(key_file="a"), "need each other"),
        ("learner", SecurityConfig(ca_file="a"), "give security.certificate_file"),
        ("actor", SecurityConfig(ca_file="a", key_file="b"), "need each other"),
        ("actor", PAIR, "give security.ca_file"),
    ],
)
def test_settings_that_do_not_make_a_whole_are_refused(end: str, security: SecurityConfig, words: str) -> None:
    """B10"""
    ends = {
        "learner": lambda: check(LearnerConfig(security=security)),
        "actor": lambda: check_actor_security(ActorConfig(learner="localhost:1", security=security)),
    }
    with pytest.raises(ConfigError, match=words):
        ends[end]()


# Tokens.


def token_file(directory: Path, *tokens: str) -> SecurityConfig:
    """Written as people rotate: a new file takes the place of the old one."""
    new, path = directory / ".token", directory / "token"
    new.write_text("".join(f"{token}\n" for token in tokens))
    new.replace(path)
    return SecurityConfig(token_file=str(path))


def test_tokens_of_every_line_are_accepted_and_the_first_is_shown(tmp_path: Path) -> None:
    """B9"""
    tokens = Tokens(token_file(tmp_path, NEW, "", f"  {OLD}  "))
    assert tokens.first() == NEW
    assert tokens.accepts(NEW)
    assert tokens.accepts(OLD)


@pytest.mark.parametrize("shown", ["", NEW[:-1], f"{NEW} ", NEW.upper(), f"{NEW}\n{OLD}", "ü" * 20, "\udcff"])
def test_token_that_is_not_exactly_one_of_the_file_is_refused(tmp_path: Path, shown: str) -> None:
    """B9"""
    assert not Tokens(token_file(tmp_path, NEW, OLD)).accepts(shown)


@settings(deadline=None)
@given(shown=st.text())
def test_token_nobody_knows_is_never_accepted(shown: str) -> None:
    """B9"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        assert Tokens(SecurityConfig()).accepts(shown) is (shown == TOKEN)


def test_token_is_compared_in_constant_time_with_every_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """B9: nothing about the answer can be read from when it comes; digests have one length."""
    tokens = Tokens(token_file(tmp_path, NEW, OLD, TOKEN))
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    for shown in (NEW, TOKEN, "", "x" * 500):
        compared.clear()
        tokens.accepts(shown)
        assert compared == [(32, 32)] * 3


def test_token_file_that_changes_counts_from_the_next_question_on(tmp_path: Path) -> None:
    """B9: rotation without restart, with a time in which both are valid."""
    tokens = Tokens(token_file(tmp_path, OLD))
    token_file(tmp_path, NEW, OLD)
    assert [tokens.accepts(OLD), tokens.accepts(NEW), tokens.first()] == [True, True, NEW]
    token_file(tmp_path, NEW)
    assert [tokens.accepts(OLD), tokens.accepts(NEW)] == [False, True]


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_text(""), lambda path: path.write_text("half")]
)
def test_token_file_that_cannot_be_used_any_more_changes_nothing_and_is_said_once(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """B9"""
    said: list[str] = []
    security = token_file(tmp_path, OLD)
    tokens = Tokens(security, say=said.append)
    damage(Path(security.token_file))
    assert tokens.accepts(OLD)
    assert tokens.accepts(OLD)
    assert len(said) == 1
    assert "stay valid" in said[0]
    token_file(tmp_path, NEW)
    assert [tokens.accepts(OLD), tokens.accepts(NEW)] == [False, True]


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("short-secret", "token 1 has 12 characters, expected 16 to 512"),
        ("x" * 513, "token 1 has 513 characters"),
        ("secret with spaces in it", "visible ASCII"),
        ("", "holds no token"),
        ("sécret-0123456789", "visible ASCII"),
    ],
)
def test_token_that_would_not_do_is_refused_without_being_told(tmp_path: Path, token: str, words: str) -> None:
    """B9: not in exceptions, nor in what they come from."""
    with pytest.raises(ConfigError, match=words) as raised:
        Tokens(token_file(tmp_path, token))
    assert not token or token not in str(raised.value)
    assert raised.value.__cause__ is None


def test_token_file_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"security\.token_file=/none/token cannot be read: No such file"):
        Tokens(SecurityConfig(token_file="/none/token"))


def test_token_of_the_environment_counts_unless_there_is_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B9"""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert Tokens(SecurityConfig()).first() == TOKEN
    assert Tokens(token_file(tmp_path, NEW)).first() == NEW
    assert not Tokens(token_file(tmp_path, NEW)).accepts(TOKEN)


def test_secrets_others_may_read_are_named(tmp_path: Path) -> None:
    security = token_file(tmp_path, NEW)
    path = Path(security.token_file)
    path.chmod(0o600)
    assert open_to_others(security) == []
    path.chmod(0o640)
    assert open_to_others(security) == [str(path)]


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        (None, ""),
        ((), ""),
        ((("authorization", f"Bearer {TOKEN}"),), TOKEN),
        ((("authorization", TOKEN),), ""),
        ((("authorization", f"Basic {TOKEN}"),), ""),
        ((("x-token", f"Bearer {TOKEN}"),), ""),
    ],
)
def test_token_is_looked_for_in_one_place_only(metadata: Any, token: str) -> None:
    """B9"""
    assert token_in(metadata) == token


class FakeContext:
    aborted: tuple[Any, str] | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1"

    async def abort(self, code: Any, details: str) -> None:
        self.aborted = code, details


def test_guard_counts_every_refusal_and_logs_some(tmp_path: Path) -> None:
    """B9: strangers cannot fill the log."""
    said: list[str] = []
    clock, metrics, context = FakeClock(), ServingMetrics(), FakeContext()
    guard = TokenGuard(Tokens(token_file(tmp_path, NEW)), metrics, RefusalLog(said.append, clock))
    for _ in range(100):
        asyncio.run(guard._refuse(None, context))
    assert context.aborted == (
        code_of(Unauthenticated()),
        "this learner asks for a token and saw none that is valid; see security.token_file",
    )
    assert metrics.sessions_refused["unauthenticated"] == 100
    assert said == LINES * ["learner: refused ipv4:10.0.0.9:1, which showed no valid token"]
    clock.advance(WINDOW_SECONDS)
    asyncio.run(guard._refuse(None, context))
    assert len(said) == LINES + 1
    assert said[-1].endswith(f"; {100 - LINES} refusals before it were not logged")


def test_refusals_all_have_a_status_and_a_label_and_authentication_is_not_tried_again() -> None:
    """B9"""
    for kind in Refused.__subclasses__():
        assert code_of(kind()) is not None
        assert kind.reason in REFUSALS
    assert not is_worth_retrying(code_of(Unauthenticated()))
    assert Unauthenticated.exit_code == 6


# Certificates.


def test_certificates_that_fit_are_taken(certificates: Certificates) -> None:
    """B10"""
    assert server_credentials(certificates.learner)
    assert client_credentials(certificates.actor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_file": "client.key"}, "do not make a pair: key values mismatch"),
        ({"key_file": "none.key"}, "do not make a pair: No such file"),
        ({"certificate_file": "server.key"}, "do not make a pair"),
        ({"ca_file": "server.key"}, "holds no certificates"),
        ({"ca_file": "none.pem"}, "holds no certificates: No such file"),
    ],
)
def test_certificate_files_that_do_not_fit_are_refused_by_name(
    certificates: Certificates, changes: dict[str, str], words: str
) -> None:
    """B10: gRPC would only say that the learner is unavailable."""
    folder = Path(certificates.ca).parent
    changed = {setting: str(folder / name) for setting, name in changes.items()}
    for make in (server_credentials, client_credentials):
        with pytest.raises(ConfigError, match=rf"security\.(certificate|ca)_file=.*{words}"):
            make(replace(certificates.learner, **changed))


def test_doctor_says_what_protects_a_learner_and_what_does_not(certificates: Certificates) -> None:
    """B11"""
    (finding,) = security(LearnerConfig(security=certificates.learner))
    assert finding.words == "security: TLS, certificates of actors, tokens"
    exposed = LearnerConfig(listen="0.0.0.0:1", security=SecurityConfig(allow_insecure=True))
    assert [finding.is_good for finding in security(exposed)] == [True, False]
    with pytest.raises(ConfigError, match="do not make a pair"):
        list(security(LearnerConfig(security=replace(certificates.learner, key_file=certificates.client.key_file))))


def test_certs_makes_files_for_their_owner_only_and_never_the_cas_key(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    run_certs(CertsConfig(out=str(folder)))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    private, public = dict.fromkeys(("server.key", "client.key", "token"), 0o600), dict.fromkeys(FILES, 0o644)
    assert modes == {**public, **private}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_to_others(SecurityConfig(key_file=str(folder / "server.key"), token_file=str(folder / "token"))) == []


def test_certs_makes_certificates_of_the_hosts_and_days_asked_for(tmp_path: Path) -> None:
    run_certs(CertsConfig(out=str(tmp_path), hosts=["10.0.0.1", "fd00::1", "learner.example"], days=7))
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["learner.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "fd00::1"]
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=6) < left <= timedelta(days=7)


def test_certs_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("precious")
    with pytest.raises(ConfigError, match="holds token already"):
        run_certs(CertsConfig(out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert (tmp_path / "token").read_text() == "precious"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": []}, "hosts=\\[\\] is empty"),
        ({"hosts": ["münchen"]}, "neither a name nor an address"),
        ({"days": 0}, "days=0"),
        ({"out": "/proc/none"}, "cannot be written to"),
    ],
)
def test_certs_that_cannot_be_made_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_certs(replace(CertsConfig(out=str(tmp_path / "certs")), **changes))
