"""`seedrl observe` with a Prometheus that only pretends; tests/integration/test_prometheus.py has the real one."""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from seedrl.commandline.settings import conf_directory
from seedrl.config import ObserveConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.monitoring.observe import Observer, default_directory, targets_of
from tests.integration.processes import Commands, Process
from tests.integration.waiting import eventually, free_address

FILES = conf_directory() / "observability"
# Says that it is ready when it is asked, until it gets a signal or a request for /quit.
PRETENDER = f"""#!{sys.executable}
import http.server, json, os, signal, sys
options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
host, port = options["web.listen-address"].rsplit(":", 1)
with open("arguments.json", "w") as file:
    json.dump(options, file)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/quit":
            print("level=error msg=\\"told to quit\\"", file=sys.stderr, flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""
DYING = """#!/bin/sh
echo 'level=info msg="Starting Prometheus"'
echo 'level=error msg="opening storage failed" err="lock DB directory: resource temporarily unavailable"'
echo 'level=info msg="See you next time!"'
exit 1
"""


def path_with(directory: Path, program: str) -> str:
    """A PATH on which `prometheus` is this program."""
    directory.mkdir()
    (directory / "prometheus").write_text(program)
    (directory / "prometheus").chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def start(commands: Commands, program: str, listen: str, *more: str) -> Process:
    path = path_with(commands.directory / "bin", program)
    data = f"data={commands.directory / 'seen'}"
    return commands.start("observe", f"listen={listen}", data, *more, PATH=path)


# Settings


@pytest.mark.parametrize("metrics", ["a:1,b:2", "a:1, b:2", ["a:1", "b:2"]])
def test_targets_of_a_list_or_of_words_are_the_same(metrics: object) -> None:
    assert targets_of(metrics) == ["a:1", "b:2"]


@pytest.mark.parametrize("metrics", ["", [], "localhost", "a:port", "http://a:1/metrics", 'a":1', "a:70000", None])
def test_targets_that_are_no_addresses_are_refused(metrics: object) -> None:
    with pytest.raises(ConfigError, match="metrics="):
        targets_of(metrics)


def test_address_to_listen_on_without_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="listen=localhost is no address"):
        Observer(ObserveConfig(listen="localhost", data=str(tmp_path)), FILES)


def test_directory_without_a_setting_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/seedrl/prometheus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache/seedrl/prometheus"


def test_address_shown_for_all_interfaces_is_one_a_browser_can_open(tmp_path: Path) -> None:
    observer = Observer(ObserveConfig(listen="0.0.0.0:9090", data=str(tmp_path)), FILES)
    assert observer.url == "http://127.0.0.1:9090/consoles/seedrl.html"


# The process


def test_prometheus_gets_targets_rules_and_console_and_ends_with_a_signal(commands: Commands) -> None:
    listen = free_address()
    process = start(commands, PRETENDER, listen, "metrics=[127.0.0.1:1,other:2]")
    process.says(f"watching 127.0.0.1:1, other:2: http://{listen}/consoles/seedrl.html")
    process.children()

    options = json.loads((commands.directory / "arguments.json").read_text())
    configuration = yaml.safe_load(Path(options["config.file"]).read_text())
    assert configuration["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:1", "other:2"]}]
    assert configuration["rule_files"] == ["rules.yml"]
    assert Path(options["config.file"]).with_name("rules.yml").read_text() == (FILES / "rules.yml").read_text()
    assert (Path(options["web.console.templates"]) / "seedrl.html").exists()
    assert options["storage.tsdb.path"] == str(commands.directory / "seen/data")

    process.signal(signal.SIGINT)
    assert process.wait() == 0
    assert process.left_behind() == []
    assert process.err == ""


def test_prometheus_ends_when_observe_is_killed(commands: Commands) -> None:
    process = start(commands, PRETENDER, free_address())
    process.says("watching")
    assert process.children()
    process.signal(signal.SIGKILL)
    eventually(lambda: process.left_behind() == [])


def test_prometheus_that_cannot_start_is_quoted(commands: Commands) -> None:
    process = start(commands, DYING, free_address())
    assert process.wait() == SeedrlError.exit_code
    assert "seedrl observe: Prometheus ended with code 1: level=error" in process.err
    assert "lock DB directory" in process.err
    assert "prometheus.log" in process.err


def test_prometheus_that_ends_by_itself_is_quoted(commands: Commands) -> None:
    listen = free_address()
    process = start(commands, PRETENDER, listen)
    process.says("watching")
    host, port = listen.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /quit HTTP/1.0\r\n\r\n")
        connection.recv(1)
    assert process.wait() == SeedrlError.exit_code
    assert 'Prometheus ended with code 3: level=error msg="told to quit"' in process.err


def test_machine_without_prometheus_is_told_how_to_get_it(commands: Commands) -> None:
    code, _, err = commands.run("observe", PATH=str(commands.directory))
    assert code == ConfigError.exit_code
    assert "apt-get install --no-install-recommends prometheus" in err
    assert "https://prometheus.io/download" in err


def test_port_in_use_is_refused_before_anything_is_started(commands: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start(commands, DYING, listen)
        assert process.wait() == ConfigError.exit_code
    assert f"listen={listen} cannot be used: Address already in use" in process.err
    assert not (commands.directory / "seen").exists()


def test_data_directory_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/true")
    (tmp_path / "file").touch()
    observer = Observer(ObserveConfig(listen=free_address(), data=str(tmp_path / "file/data")), FILES)
    with pytest.raises(ConfigError, match="cannot be written to"):
        observer.start()
