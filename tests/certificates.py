"""Certificates of a CA of the tests, good and bad ones, as files."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from seedrl.config import SecurityConfig
from seedrl.wire.certificates import Authority, Pair

TOKEN = "a-token-of-the-tests-0123456789"
TOMORROW = datetime.now(UTC) + timedelta(days=1)
YESTERDAY = datetime.now(UTC) - timedelta(days=1)
HERE = ["localhost", "127.0.0.1"]


class Certificates:
    """Two CAs and what they have issued. `learner` and `actor` are settings that work together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ca, other = Authority(TOMORROW), Authority(TOMORROW)
        self.ca, self.other_ca = self.file("ca.pem", ca.certificate), self.file("other-ca.pem", other.certificate)
        self.server = self._pair("server", ca.issue_server(HERE, TOMORROW))
        self.expired_server = self._pair("expired-server", ca.issue_server(HERE, YESTERDAY))
        self.elsewhere = self._pair("elsewhere", ca.issue_server(["elsewhere.example"], TOMORROW))
        self.client = self._pair("client", ca.issue_client(TOMORROW))
        self.expired_client = self._pair("expired-client", ca.issue_client(YESTERDAY))
        self.foreign_client = self._pair("foreign-client", other.issue_client(TOMORROW))
        self.token = self.file("token", TOKEN.encode())
        self.learner = replace(self.server, ca_file=self.ca, token_file=self.token)
        self.actor = replace(self.client, ca_file=self.ca, token_file=self.token)

    def file(self, name: str, content: bytes) -> str:
        path = self._directory / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        return str(path)

    def _pair(self, name: str, pair: Pair) -> SecurityConfig:
        return SecurityConfig(
            certificate_file=self.file(f"{name}.pem", pair.certificate), key_file=self.file(f"{name}.key", pair.key)
        )
