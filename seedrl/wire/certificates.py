"""`seedrl certs`: a CA, a certificate for each end and a token, enough for a learner and its actors on machines of one
owner. Knows nothing of how they are used, except for the command lines it prints.

The CA's key is never written: it signs two certificates and is forgotten, so that no third one can be signed.
"""

import ipaddress
import os
import secrets
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from seedrl.config import CertsConfig
from seedrl.errors import ConfigError

PORT = 50051
CLOCK_SKEW = timedelta(hours=1)  # machines whose clocks are behind accept the certificates, too
FILES = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key", "token")


def run_certs(config: CertsConfig) -> None:
    directory = Path(config.out)
    _check(config, directory)
    contents = make(config)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in FILES:
            _write(directory / name, contents[name])
    except OSError as error:
        raise ConfigError(f"out={directory} cannot be written to: {error.strerror}") from error
    print("\n".join(_instructions(directory, config)))


def make(config: CertsConfig) -> dict[str, bytes]:
    """Return the content of each of FILES."""
    until = datetime.now(UTC) + timedelta(days=config.days)
    ca = Authority(until)
    server, client = ca.issue_server(config.hosts, until), ca.issue_client(until)
    return {
        "ca.pem": ca.certificate,
        "server.pem": server.certificate,
        "server.key": server.key,
        "client.pem": client.certificate,
        "client.key": client.key,
        "token": f"{secrets.token_urlsafe(32)}\n".encode(),
    }


class Pair(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A CA, for as long as it is kept in memory. Owned by one thread."""

    def __init__(self, until: datetime) -> None:
        self._name = _name("seedrl development CA")
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = self._builder(self._name, self._key.public_key(), until)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(_key_usage(is_ca=True), critical=True)
        self.certificate = own.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def issue_server(self, hosts: list[str], until: datetime) -> Pair:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        return self._issue("seedrl server", until, names, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))

    def issue_client(self, until: datetime) -> Pair:
        return self._issue("seedrl client", until, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))

    def _issue(self, name: str, until: datetime, *extensions: x509.ExtensionType) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(name), key.public_key(), until)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(is_ca=False), critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, SHA256())
        return Pair(
            certificate.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, until: datetime
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=public,
            serial_number=x509.random_serial_number(),
            not_valid_before=min(datetime.now(UTC), until) - CLOCK_SKEW,
            not_valid_after=until,
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        return builder.add_extension(issuer, critical=False)


def _check(config: CertsConfig, directory: Path) -> None:
    if not config.hosts:
        raise ConfigError("hosts=[] is empty; name what actors will write in learner=HOST:PORT")
    if config.days < 1:
        raise ConfigError(f"days={config.days} must be at least 1")
    there = [name for name in FILES if (directory / name).exists()]
    if there:
        raise ConfigError(
            f"{directory} holds {', '.join(there)} already, and nothing is overwritten; give another out="
        )


def _write(path: Path, content: bytes) -> None:
    """Write a file; all but certificates are readable by their owner alone, from the very first byte."""
    mode = 0o644 if path.suffix == ".pem" else 0o600
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _instructions(directory: Path, config: CertsConfig) -> list[str]:
    host = f"[{config.hosts[0]}]" if ":" in config.hosts[0] else config.hosts[0]
    return [
        f"{directory} holds {', '.join(FILES)}; valid for {config.days} days",
        "",
        "On the learner's machine, with server.pem, server.key, ca.pem and token:",
        f"  seedrl learner listen=0.0.0.0:{PORT} {_settings(directory, 'server')}",
        "On every actor's machine, with client.pem, client.key, ca.pem and token:",
        f"  seedrl actor learner={host}:{PORT} {_settings(directory, 'client')}",
        "",
        "Any process with token and client.key can join: copy them over ssh and keep them at mode 0600.",
    ]


def _settings(directory: Path, end: str) -> str:
    files = {"certificate_file": f"{end}.pem", "key_file": f"{end}.key", "ca_file": "ca.pem", "token_file": "token"}
    return " ".join(f"security.{setting}={shlex.quote(str(directory / name))}" for setting, name in files.items())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"hosts: {host!r} is neither a name nor an address: {error}") from error


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
