"""What holds for the whole repository, whoever edits which file: layers, imports, generated code, settings, words."""

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envs_server.session import MOVE_SECONDS
from seedrl.commandline.checking import checked
from seedrl.commandline.line import read
from seedrl.commandline.main import register_schemas, vocabulary
from seedrl.commandline.settings import conf_directory, settings_of
from seedrl.commands import COMMANDS
from seedrl.config import ActorConfig, LearnerConfig
from seedrl.serving import protocol, quarantine
from seedrl.serving.sessions import session_seed
from seedrl.v1 import inference_pb2
from seedrl.validation import check
from seedrl.wire import channel, codec, framing, memory, messages, spaces

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
GENERATED = "seedrl.v1"

# A module imports from its own row and from those above it. A name stands for the module or the whole package.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("seedrl.version", "seedrl.config", "seedrl.errors", "seedrl.specs", "seedrl.metrics", "seedrl.status"),
        *("seedrl.rows", "seedrl.types", "seedrl.actions", "seedrl.run.identity", "seedrl.run.stopping"),
        *("seedrl.schema", "seedrl.plugins", "seedrl.tracebacks", "seedrl.sizes", "seedrl.algorithms.settings"),
    ),
    (
        *("seedrl.v1", "seedrl.wire", "seedrl.models", "seedrl.validation"),
        *("seedrl.league_settings", "seedrl.store_settings"),
        *("seedrl.monitoring.endpoint", "seedrl.monitoring.exposition"),
    ),
    (
        *("seedrl.device", "seedrl.policy", "seedrl.bank", "seedrl.columns", "seedrl.selection", "seedrl.store"),
        *("seedrl.algorithms", "seedrl.run.checkpoint"),
    ),
    ("seedrl.serving", "seedrl.learning", "envs_server"),
    (
        *("seedrl.monitoring", "seedrl.run", "seedrl.ranks", "seedrl.recordings", "seedrl.roles", "seedrl.launching"),
        "seedrl.trained",
    ),
    ("seedrl", "seedrl.commandline", "seedrl.commands", "seedrl.job", "seedrl.job_handle"),
    ("seedrl.__main__", "envs_server.__main__"),
)
# These share a row and still know nothing of each other.
BLIND = {"seedrl.serving", "seedrl.learning", "envs_server"}

# Who may import what. numpy is everybody's; everything else that is not Python's own is in this table.
MAY_IMPORT: dict[str, set[str]] = {
    "torch": {
        "seedrl.types",
        "seedrl.actions",
        "seedrl.device",
        "seedrl.models",
        "seedrl.policy",
        "seedrl.bank",
        "seedrl.columns",
        "seedrl.store",
        "seedrl.algorithms",
        "seedrl.serving.service",
        "seedrl.serving.acting",
        "seedrl.serving.graphs",
        "seedrl.serving.inference",
        "seedrl.serving.mixture",
        "seedrl.serving.policy_step",
        "seedrl.serving.slots",
        "seedrl.serving.staging",
        "seedrl.learning",
        "seedrl.ranks",
        "seedrl.launching.torchrun",
        "seedrl.run.budget",
        "seedrl.run.checkpoint",
        "seedrl.run.snapshot",
        "seedrl.recordings",
        "seedrl.roles",
        "seedrl.trained",
    },
    "grpc": {
        "seedrl.v1",
        "seedrl.wire.channel",
        "seedrl.wire.codes",
        "seedrl.wire.tls",
        "seedrl.serving.guard",
        "seedrl.serving.server",
        "envs_server.session",
    },
    "grpc_health": {"seedrl.serving.server"},
    "grpc_reflection": {"seedrl.serving.server"},
    "google": {"seedrl.v1", "seedrl.wire"},
    "envpool": {"envs_server.pool"},
    "ale_py": {"envs_server.ale"},
    "gymnasium": {"envs_server.stepping"},
    "fsspec": {"seedrl.recordings.places"},
    "msgpack": {"seedrl.wire.packed"},
    "websockets": {"envs_server.openenv", "seedrl.serving.websocket"},
    "hydra": {f"seedrl.commandline.{name}" for name in ("checking", "composing", "search", "population")},
    "omegaconf": {"seedrl.commandline.composing"},
    "optuna": {"seedrl.commandline.search"},
    "yaml": {"seedrl.run.directory", "seedrl.launching.kubernetes", "seedrl.trained.card"},
    "rich": {"seedrl.run.progress", "seedrl.monitoring.overview"},
    "safetensors": {"seedrl.run.checkpoint", "seedrl.recordings.files"},
    "prometheus_client": {"seedrl.monitoring.exposition"},
    "cryptography": {"seedrl.wire.certificates"},
    "matplotlib": {"seedrl.monitoring.plots"},
    "tensorboard": {"seedrl.monitoring.sinks"},
    "wandb": {"seedrl.monitoring.sinks"},
    "onnx": {"seedrl.trained.export"},
    "onnxruntime": {"seedrl.trained.export"},
    "onnxscript": {"seedrl.trained.export"},
    "imageio": {"seedrl.trained.record"},
    "imageio_ffmpeg": {"seedrl.trained.record"},
    "PIL": {"seedrl.trained.record"},
    "huggingface_hub": {"seedrl.trained.hub"},
    "ray": {f"seedrl.launching.ray_{name}" for name in ("autoscaler", "cluster", "driver", "host", "host_handle")},
}
# The name of a distribution where it is not the name of what is imported.
IMPORT_NAMES = {
    "ale-py": "ale_py",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "huggingface-hub": "huggingface_hub",
    "hydra-core": "hydra",
    "imageio-ffmpeg": "imageio_ffmpeg",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pyyaml": "yaml",
}

UNSAFE_MODULES = {"cloudpickle", "cPickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "numpy.load", "torch.load", "torch.save"} | {
    f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")
}

# Words for which the design has another one.
FORBIDDEN_WORDS = (
    *("worker", "rollout", "trajectory", "trajectories", "agent", "baseline", "weights_id"),
    *("util", "manager", "helper"),
)


def modules(*packages: str) -> dict[str, Path]:
    """Dotted name → file of every module below the packages."""
    found = {}
    for path in sorted(itertools.chain.from_iterable((ROOT / package).rglob("*.py") for package in packages)):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[dotted.removesuffix(".__init__")] = path
    return found


PACKAGE = modules("seedrl", "envs_server")
WRITTEN = {name: path for name, path in PACKAGE.items() if not name.startswith(f"{GENERATED}.")}
WITH_BENCH = {**WRITTEN, **modules("bench")}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports anywhere, functions included; `from a import b` gives a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, not relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports_of(path: Path) -> set[str]:
    """The modules of this repository that a file imports."""
    own = set()
    for name in imports_of(path):
        if name.split(".")[0] in ("seedrl", "envs_server"):
            own.add(name if name in PACKAGE else name.rpartition(".")[0])
    return own


def belongs_to(module: str, name: str) -> bool:
    """`seedrl` alone is the package's own __init__, not everything below it."""
    return module == name or (name != "seedrl" and module.startswith(f"{name}."))


def place_of(module: str) -> tuple[int, str]:
    """The row of LAYERS a module is in, and under which name."""
    places = [(row, name) for row, names in enumerate(LAYERS) for name in names if belongs_to(module, name)]
    assert places, f"{module} has no place in LAYERS yet: decide what it may import"
    return max(places, key=lambda place: len(place[1]))


# Imports


def test_imports_between_layers_point_one_way() -> None:
    wrong = []
    for module, path in PACKAGE.items():
        row, name = place_of(module)
        for imported in sorted(own_imports_of(path)):
            other_row, other_name = place_of(imported)
            if other_row > row or (other_name != name and {name, other_name} <= BLIND):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_imports_between_modules_have_no_cycle() -> None:
    TopologicalSorter({module: own_imports_of(path) - {module} for module, path in PACKAGE.items()}).prepare()


def test_imports_of_other_packages_only_where_allowed() -> None:
    wrong = []
    for module, path in PACKAGE.items():
        for package in sorted(
            {name.split(".")[0] for name in imports_of(path)} - {"numpy", "seedrl", "envs_server", "bench"}
        ):
            allowed = MAY_IMPORT.get(package, set())
            if package not in sys.stdlib_module_names and not any(belongs_to(module, name) for name in allowed):
                wrong.append(f"{module} imports {package}")
    assert wrong == []


def test_imports_of_generated_code_only_inside_wire() -> None:
    """protobuf stays there: everybody else has the records of wire/messages.py."""
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("seedrl", "envs_server", "bench").items()
        for name in imports_of(path)
        if belongs_to(name, GENERATED) and not belongs_to(module, "seedrl.wire") and not belongs_to(module, GENERATED)
    ]
    assert wrong == []


def test_imports_of_light_modules_load_nothing_heavy() -> None:
    """What is imported indirectly counts as well, so this asks Python and not the source."""
    torch_free = ("envs_server", "seedrl.wire", "seedrl.config", "seedrl.errors", "seedrl.specs", "seedrl.metrics")
    torch_free += (
        "seedrl.monitoring",
        "seedrl.run.directory",
        "seedrl.run.context",
        "seedrl.launching",
        "seedrl.run.progress",
    )
    light = [name for name in WRITTEN if any(belongs_to(name, free) for free in torch_free)]
    light.remove("envs_server.__main__")
    light.remove("seedrl.monitoring.monitor")
    program = f"""
import importlib, sys
import seedrl.commandline.main
print(*sorted({{"torch", "grpc", "envpool", "rich"}} & set(sys.modules)), sep=",")
for name in {light}:
    importlib.import_module(name)
print(*sorted({{"torch", "envpool", "matplotlib", "tensorboard", "wandb"}} & set(sys.modules)), sep=",")
"""
    after_commands, after_light = run(sys.executable, "-c", program).split("\n")[:2]
    assert after_commands == "", "the command line must start fast"
    assert after_light == "", "actors and the launcher must do without these"


# Dependencies

ROLES = ("learner", "actor")
OPTIONS = (
    "ale",
    "certs",
    "gymnasium",
    "hub",
    "onnx",
    "openenv",
    "openpi",
    "optuna",
    "plot",
    "ray",
    "remote",
    "tensorboard",
    "video",
    "wandb",
)  # extras that a role can do without


def declared(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, with and without extras; seedrl itself left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    requirements = [Requirement(line) for line in itertools.chain.from_iterable(lists)]
    return [requirement for requirement in requirements if requirement.name != "seedrl"]


def test_pyproject_declares_exactly_what_is_imported() -> None:
    names = [canonicalize_name(requirement.name) for requirement in declared(*ROLES, *OPTIONS)]
    imported = {name.split(".")[0] for path in PACKAGE.values() for name in imports_of(path)}
    assert {IMPORT_NAMES.get(name, name) for name in names} == {
        name
        for name in imported
        if name not in sys.stdlib_module_names and name not in ("seedrl", "envs_server", "bench")
    }


def test_pyproject_without_extras_needs_neither_torch_nor_envpool() -> None:
    assert {requirement.name for requirement in declared()}.isdisjoint({"torch", "envpool", "safetensors"})


def test_constraints_pin_every_declared_requirement_to_a_fitting_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "name==version and no build such as +cpu"
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines)
    assert pins["torch"] == "2.13.0"
    for requirement in declared(*ROLES, *OPTIONS, "bench", "dev"):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


# Generated code and its source


def test_generated_code_is_what_the_proto_gives(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    run(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *protos)
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    committed = {
        path.relative_to(ROOT): path.read_bytes()
        for path in (ROOT / "seedrl/v1").glob("*.py*")
        if path.name != "__init__.py"
    }
    assert sorted(fresh) == sorted(committed)
    stale = [str(path) for path in fresh if fresh[path] != committed[path]]
    assert stale == [], "run `make proto`"


def test_proto_passes_buf_lint() -> None:
    run(str(Path(sys.executable).with_name("buf")), "lint", cwd=ROOT / "proto")


def fields_of(message: Descriptor, seen: frozenset[str] = frozenset()) -> Iterator[FieldDescriptor]:
    """Every field that a message can hold, however deep."""
    for field in message.fields:
        yield field
        if field.message_type is not None and field.message_type.full_name not in seen:
            yield from fields_of(field.message_type, seen | {message.full_name})


def test_proto_answers_have_no_field_that_could_hold_weights() -> None:
    """B12: no call returns them, whoever asks. Bytes and lists of numbers are named here, with what is in them."""
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    fields = [field for method in methods for field in fields_of(method.output_type)]
    assert {field.full_name.removeprefix("seedrl.v1.") for field in fields if field.type == field.TYPE_BYTES} == {
        "Act.action",
        "Memory.token",
    }
    lists = [field for field in fields if field.is_repeated and field.message_type is None]
    assert {field.full_name.removeprefix("seedrl.v1.") for field in lists} == {
        "Act.request_id",
        "Act.action",
        "Env.wrappers",
    }


def stated_limits() -> list[str]:
    """What the comments of the proto say of numbers, made from the numbers that the code has."""
    serving, longest_name = LearnerConfig().serving, codec.MAX_NAME
    observation, reward = (re.sub(r"e\+0*", "e", f"{most:g}") for most in (serving.max_observation, serving.max_reward))
    streams = dict(channel.server_options())["grpc.max_concurrent_streams"]
    choices, seconds = spaces.MAX_CHOICES, f"{quarantine.SECONDS:g} seconds"
    patience = f"{messages.PING_PATIENCE:g} seconds"
    seed_bits = max(session_seed(1, 0, number) for number in range(100)).bit_length()
    assert protocol.MOVE_SECONDS == MOVE_SECONDS  # of the actor
    return [
        f"no sooner than {seconds} after that",
        f"Hello must come within {protocol.HELLO_SECONDS:g} seconds of connecting",
        f"Ready within {protocol.READY_SECONDS:g} seconds of Welcome",
        f"serving.max_silence seconds ({serving.max_silence:g} unless set)",
        f"neither waits longer than {protocol.MOVE_SECONDS:g} seconds",
        f"one that counts {messages.MAX_REDIRECTS} is served",
        f"cannot follow redirects counts {messages.MAX_REDIRECTS} from the start",
        f"A message has at most {messages.MIN_MESSAGE_BYTES / 2**20:g} MiB",
        f"never more than {messages.MAX_MESSAGE_BYTES / 2**20:g} MiB",
        f"A Hello or a Report has at most {framing.MAX_BYTES / 1024:g} KiB",
        f"a Ready {framing.MAX_READY_BYTES / 1024:g} KiB",
        f"A Step above {framing.MAX_BYTES / 1024:g} KiB",
        f"An observation and an action have at most {framing.MAX_LEAVES} leaves each",
        f"a leaf at most {spaces.MAX_RANK} dimensions",
        f"One connection carries at most {streams} streams",
        f"serving.max_observation of the learner ({observation} unless set)",
        f"serving.max_reward ({reward} unless set)",
        f"sends an HTTP/2 ping every {channel.SERVER_PING_MS / 1000:g} seconds",
        f"has not answered one for {patience}",
        f"step environments for less than {patience}",
        f"at least {channel.SHORTEST_PING_MS / 1000:g} second apart",
        f"the current version is {messages.PROTOCOL_VERSION}.",
        f"only {longest_name} characters are kept",
        f"the user id, at most {codec.MAX_HOST} characters",
        f"new with every process, at most {codec.MAX_INSTANCE} characters",
        f"Only {codec.MAX_REASON} characters are kept",
        f"The seed of this session's environments, below 2^{seed_bits}:",
        f"if the observation is a plain array, which is then its only leaf; else 1 to {longest_name} printable",
        f"if the action is a plain array, which is then its only leaf; else 1 to {longest_name} printable",
        f"which are integers, at most {choices};",
        f"at most {choices} for all leaves together",
        f"at most {choices // 2} such entries",
        f"take at least {memory.WORTH_BYTES / 1024:g} KiB",
        f"seedrl's own: {ActorConfig().patience:g} seconds",
    ]


def test_proto_states_the_numbers_that_the_code_has() -> None:
    """Clients are written from the proto alone. One of its limits used to be wrong by four orders of magnitude."""
    lines = (ROOT / "proto/seedrl/v1/inference.proto").read_text().splitlines()
    text = " ".join(line.strip().removeprefix("//").strip() for line in lines)
    assert [words for words in stated_limits() if text.count(words) != 1] == []


# Settings


def composed(command: str, overrides: Iterable[str] = (), conf: Path = CONF) -> Any:
    """The settings a command would get, as its dataclass."""
    register_schemas()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
        settings = compose(command, overrides=list(overrides))
    return OmegaConf.to_object(settings)


def choices() -> list[str]:
    """Every group=choice that conf/ offers."""
    return [f"{path.parent.name}={path.stem}" for path in sorted(CONF.glob("*/*.yaml"))]


def test_conf_of_the_checkout_is_the_one_commands_use() -> None:
    assert conf_directory() == CONF


def test_conf_has_one_file_per_command() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_conf_without_overrides_composes(command: str) -> None:
    schema = COMMANDS[command].schema
    overrides = [f"{setting.key}=anything" for setting in settings_of(schema) if setting.shown == "required"]
    assert type(composed(command, overrides)) is schema


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        (command, choice)
        for command in ("run", "learner")
        for choice in choices()
        if command == "run" or not choice.startswith("launch=")
    ],
)
def test_conf_choice_composes_into_settings_that_work_together(command: str, choice: str) -> None:
    settings = composed(command, [choice])
    assert isinstance(settings, LearnerConfig)
    check(settings)


def test_conf_with_a_key_the_schema_lacks_is_refused(tmp_path: Path) -> None:
    """The tests above would see a misspelt key."""
    conf = shutil.copytree(CONF, tmp_path / "conf")
    (conf / "env/misspelt.yaml").write_text("# @package _global_\nenv:\n  frame_stak: 4\n")
    with pytest.raises(HydraException, match="frame_stak"):
        composed("run", ["env=misspelt"], conf)


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_all_have_a_meaning(command: str) -> None:
    meanings = [(setting.key, setting.meaning) for setting in settings_of(COMMANDS[command].schema)]
    assert len(meanings) == len(dict(meanings))
    assert [key for key, meaning in meanings if len(meaning.strip()) < 8 or meaning.endswith(".")] == []


# The source


def names_in(module: ast.Module) -> dict[str, str]:
    """Local name → what it was imported as, in full."""
    known = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def test_source_never_runs_or_unpickles_what_it_reads() -> None:
    wrong = []
    for name, path in WITH_BENCH.items():
        module = tree(path)
        wrong += [f"{name} imports {each}" for each in imports_of(path) if each.split(".")[0] in UNSAFE_MODULES]
        known = names_in(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                first, *rest = ast.unparse(node.func).split(".")
                called = ".".join([known.get(first, first), *rest])
                if called in UNSAFE_CALLS or any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                    wrong.append(f"{name}:{node.lineno} calls {called}")
    assert wrong == []


def test_source_modules_all_say_what_they_are() -> None:
    assert [name for name, path in WITH_BENCH.items() if path.read_text() and not ast.get_docstring(tree(path))] == []


def test_source_has_no_notes_to_self() -> None:
    note = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    folders = ("seedrl", "envs_server", "bench", "conf", "proto", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [*files, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    text = [path for path in files if path.suffix in ("", ".py", ".pyi", ".yaml", ".proto", ".toml", ".md")]
    assert [str(path.relative_to(ROOT)) for path in text if note.search(path.read_text())] == []


def definitions_in(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Every identifier a file gives to something; what it only uses belongs to whoever defined it."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname, node.lineno) for alias in node.names if alias.asname)


def describe_request(identifier: str) -> str:
    """FooBar and foo_bar as _foo_bar_."""
    return "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().strip("_") + "_"


def test_source_uses_the_words_of_the_design() -> None:
    wrong = []
    for name, path in WRITTEN.items():
        identifiers = [(path.stem, 1), *definitions_in(tree(path))]
        for identifier, line in identifiers:
            if any(re.search(f"_{word}s?_", describe_request(identifier)) for word in FORBIDDEN_WORDS):
                wrong.append(f"{name}:{line} {identifier}")
    assert wrong == []


# Prose

# Openings of docstrings that only make sense after the name of what they describe.
FRAGMENT = re.compile(
    r"(Of|That|Those|The same|As many|Or|And|But|Whose|Which|What|Whether|Where|Who|How|By|For|So many)\b"
)
# Words that a native speaker would not use here, with the ones to use instead.
UNIDIOMATIC = re.compile(
    r"\b((?:go|goes|went|going) on|anew|so many|whoever|nobody|somebody)\b", re.IGNORECASE
)  # continue or resume, again, N, and processes are not persons


def docstrings_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the docstring of a module and of everything in it, with its line."""
    for node in ast.walk(tree(path)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            yield text, node.body[0].lineno


def prose() -> list[Path]:
    """Return the Markdown files that people read and that no program writes."""
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench/README.md"]


def test_docstrings_begin_with_more_than_a_fragment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for path in WITH_BENCH.values()
        for text, line in docstrings_in(path)
        if FRAGMENT.match(text)
    ]
    assert wrong == [], "begin with a verb or a noun: Return the …, The … that …"


def test_documents_are_idiomatic() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {found.group()}"
        for path in prose()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := UNIDIOMATIC.search(line))
    ]
    assert wrong == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_idiomatic(command: str) -> None:
    settings = settings_of(COMMANDS[command].schema)
    wrong = [setting for setting in settings if UNIDIOMATIC.search(setting.meaning)]
    assert [f"{setting.key}: {setting.meaning}" for setting in wrong] == []


def test_front_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert 60 <= len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 80


def test_documents_link_only_to_what_exists() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in prose()
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert wrong == []


def test_documents_all_have_a_place_in_the_site() -> None:
    """The build of the site would fail as well, but only in the long tests."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    placed = set(re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE))
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents - placed == set(), "name them in the nav of mkdocs.yml"


def test_architecture_names_only_files_and_functions_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:seedrl|envs_server)/[\w/]+\.py)`(?: `(\w+)`)?", text)
    assert len(named) >= 15
    assert [path for path, _ in named if not (ROOT / path).is_file()] == []
    missing = [(path, name) for path, name in named if name and f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_only_the_algorithms_know_an_algorithm_by_name() -> None:
    """A new algorithm is a new file: nothing else may name the built-in one or the parts of its loss."""
    known = re.compile(r"v-?trace|rho_bar|clipped_rho", re.IGNORECASE)
    sources = [path for folder in ("seedrl", "envs_server") for path in (ROOT / folder).rglob("*.*")]
    others = [path for path in sources if ROOT / "seedrl/algorithms" not in path.parents]
    text = [path for path in others if path.suffix in (".py", ".html", ".json", ".pyi")]
    assert [str(path.relative_to(ROOT)) for path in text if known.search(path.read_text())] == []


# What the documentation tells people to type


def shell_lines(markdown: str) -> Iterator[str]:
    """The commands in ```sh, ```bash and ```console blocks, comments and prompts removed."""
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):  # what has no prompt is output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from lines


def commands_in(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, without redirections and VARIABLE=value before them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_operator, group in itertools.groupby(lexer, lambda token: set(token) <= set("();<>|&")):
        if not is_operator:
            yield list(itertools.dropwhile(lambda token: re.match(r"\w+=", token), group))


def documented(program: str) -> list[str]:
    """Every command line of a program in the Markdown files that people read."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
    return [
        shlex.join(command)
        for path in sorted(files)
        for line in shell_lines(path.read_text())
        for command in commands_in(line)
        if command and Path(command[0]).name == program
    ]


def targets() -> dict[str, str]:
    """Target → its line of help."""
    return dict(re.findall(r"^([a-z-]+):.*?(?:## (.+))?$", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_makefile_targets_all_have_a_line_of_help() -> None:
    assert [name for name, meaning in targets().items() if not meaning] == []


def test_makefile_train_installs_no_development_tools() -> None:
    installs = {
        target: re.findall(r"-e '\.\[(.+?)\]'", run("make", "--dry-run", "--always-make", target))
        for target in ("train", "lint")
    }
    assert installs == {"train": ["all,plot"], "lint": ["all,plot", "dev"]}


@pytest.mark.parametrize("line", documented("make"))
def test_documented_make_targets_exist(line: str) -> None:
    named = [word for word in shlex.split(line)[1:] if "=" not in word and not word.startswith("-")]
    assert set(named) <= set(targets())


@pytest.mark.parametrize("line", documented("seedrl"))
def test_documented_commands_compose(line: str) -> None:
    command, *rest = shlex.split(line)[1:]
    if command in ("--help", "--version", "completion"):
        return
    if rest and rest[0] in (verb for verb, _, _ in COMMANDS[command].verbs):
        return
    words = read(COMMANDS[command], vocabulary(command), rest)
    composed(command, [one_of(override) for override in checked(vocabulary(command), words.overrides, words.is_sweep)])


def one_of(override: str) -> str:
    """An override itself, or the first value of a sweep such as seed=1,2,3."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return override
    if parsed.is_interval_sweep():
        return f"{parsed.get_key_element()}={parsed.value().start}"
    return f"{parsed.get_key_element()}={next(parsed.sweep_string_iterator())}"


def run(*command: str, cwd: Path = ROOT) -> str:
    """What a program printed; fails with everything it said if it failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_tour_names_tests_that_exist() -> None:
    rooms = {"T": ROOT / "tests", "I": ROOT / "tests/integration", "C": ROOT / "tests/chaos"}
    tour = (ROOT / "tests/tour.md").read_text()
    named = re.findall(r"\b([TIC])/(test_\w+)((?:(?:, )?::test_\w+(?:\[[^]]*\])?…?)*)", tour)
    assert len(named) > 100
    missing = []
    for room, file, tests in named:
        text = (rooms[room] / f"{file}.py").read_text()
        for test, is_cut in re.findall(r"::(test_\w+)(…?)", tests):
            if f"def {test}{'' if is_cut else '('}" not in text:
                missing.append(f"{room}/{file}::{test}")
    assert missing == []
