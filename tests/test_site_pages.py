"""The pages that the documentation site generates hold everything that they are generated from."""

import importlib.util
import re
from types import ModuleType

import pytest

from seedrl import errors
from seedrl.commandline.settings import settings_of
from seedrl.commands import COMMANDS
from seedrl.v1 import inference_pb2
from tests.documented import ROOT


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site/pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_every_command_are_on_their_page(pages: ModuleType) -> None:
    sections = dict(re.findall(r"^## seedrl (\S+)\n(.*?)(?=^## |\Z)", pages.settings(), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(COMMANDS)
    for name, command in COMMANDS.items():
        listed = set(re.findall(r"^\| `(.+?)` \|", sections[name], re.MULTILINE))
        missing = {setting.key for setting in settings_of(command.schema)} - listed
        assert not missing or "It has the settings of [`seedrl run`]" in sections[name]
    assert "| `seed` | `1` | random seed of environments" in sections["run"]
    assert "`listen` | `127.0.0.1:50051`" in sections["learner"]  # another default than that of `seedrl run`


def test_protocol_page_has_every_message_and_field(pages: ModuleType) -> None:
    text = pages.protocol(pages.PROTO.read_text())
    titles = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    for message in inference_pb2.DESCRIPTOR.message_types_by_name.values():
        assert message.name in titles
        section = text.partition(f"\n## {message.name}\n")[2].partition("\n## ")[0]
        for field in message.fields:
            assert f"- `{field.name}` = {field.number}" in section
    assert "- `rpc Stream(stream StreamRequest) returns (stream StreamResponse)`: One call is one session." in text
    assert "\n14. In a simulation with several players" in text


def test_exit_codes_are_those_of_the_errors(pages: ModuleType) -> None:
    listed = {
        name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", pages.exit_codes(), re.MULTILINE)
    }
    assert listed == {name: getattr(errors, name).exit_code for name in listed}
    named = {each.exit_code for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "exit_code")}
    assert named - {1} == set(listed.values())


def test_python_api_has_signatures_and_docstrings(pages: ModuleType) -> None:
    text = pages.python_api()
    assert "seedrl.load(run='', checkpoint='newest', *, greedy=True" in text
    assert "Return the trained policy of a run directory" in text
    for members in pages.API.values():
        for member in members:
            assert f"### {member.__name__}\n" in text
            assert member.__doc__, f"{member} has no docstring"


@pytest.mark.parametrize(
    ("source", "uri", "link", "expected"),
    [
        ("docs/a.md", "a.md", "[data](data.md#frames)", "[data](data.md#frames)"),
        ("docs/tutorials/a.md", "tutorials/a.md", "[data](../data.md)", "[data](../data.md)"),
        ("docs/a.md", "a.md", "[scores](../bench/README.md#scores)", "[scores](bench/README.md#scores)"),
        ("docs/a.md", "a.md", "[the proto](../proto/seedrl/v1/inference.proto)", "[the proto](reference/protocol.md)"),
        ("docs/a.md", "a.md", "[base.py](../seedrl/algorithms/base.py)", "`seedrl/algorithms/base.py`"),
        ("docs/a.md", "a.md", "[the store](../seedrl/store.py)", "the store (`seedrl/store.py`)"),
        ("ARCHITECTURE.md", "architecture.md", "[data](docs/data.md)", "[data](data.md)"),
        ("bench/RESULTS.md", "bench/RESULTS.md", "![wire](results/wire.png)", "![wire](results/wire.png)"),
        ("docs/a.md", "a.md", "[gone](../seedrl/gone.py)", "[gone](../seedrl/gone.py)"),
        ("docs/a.md", "a.md", "[web](https://example.org/a.md)", "[web](https://example.org/a.md)"),
        ("docs/a.md", "a.md", "[here](#there)", "[here](#there)"),
    ],
)
def test_links_lead_within_the_site_or_become_paths(
    pages: ModuleType, source: str, uri: str, link: str, expected: str
) -> None:
    assert pages.relinked(f"see {link}.", source, uri) == f"see {expected}."
