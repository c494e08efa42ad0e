"""A hook of mkdocs: generates reference pages, adds documents of the top level, and turns links out of docs/ around.

A link to another page becomes a link within the site; one to a file of the repository becomes its path, since the site
may be read where there is no repository. mkdocs.yml has the order of pages. Knows nothing of how pages look.
"""

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import envs_server
import envs_server.pool
import seedrl
from seedrl import errors, job, job_handle, specs
from seedrl.algorithms import base as algorithms
from seedrl.commandline.settings import Setting, settings_of
from seedrl.commands import COMMANDS
from seedrl.config import LearnerConfig
from seedrl.models import base as models
from seedrl.selection import base as selection

ROOT = Path(__file__).parents[2]
# Files outside docs/ → the page that stands for them: a copy, or what is generated from them.
ADDED = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "bench/README.md": "bench/README.md",
    "bench/RESULTS.md": "bench/RESULTS.md",
    "proto/seedrl/v1/inference.proto": "reference/protocol.md",
    "seedrl/config.py": "reference/settings.md",
    "seedrl/algorithms/settings.py": "reference/settings.md",
    "seedrl/__init__.py": "reference/python-api.md",
    "seedrl/errors.py": "reference/exit-codes.md",
}
COPIED = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "bench/RESULTS.md")
PROTO = ROOT / "proto/seedrl/v1/inference.proto"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
MEMBER = re.compile(r"(?:(rpc) (\w+)\((.*?)\) returns \((.*?)\)|([\w. <>,]*?)\s*\b(\w+) = (\d+);)(?:\s*//(.*))?")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and those from outside docs/ with their pictures."""
    pages = {
        "reference/settings.md": settings(),
        "reference/protocol.md": protocol(PROTO.read_text()),
        "reference/python-api.md": python_api(),
        "reference/exit-codes.md": exit_codes(),
    }
    pages |= {page: (ROOT / path).read_text() for path, page in ADDED.items() if path in COPIED}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "bench/results").glob("*.png")):
        files.append(File.generated(config, f"bench/results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links around; the blocks of programs stay as they are."""
    uri = page.file.src_uri
    sources = {place: path for path, place in ADDED.items() if path in COPIED}
    source = sources.get(uri, f"docs/{uri}")
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [relinked(markdown[at : fence.start()], source, uri), fence.group()]
        at = fence.end()
    return "".join([*parts, relinked(markdown[at:], source, uri)])


def relinked(text: str, source: str, uri: str) -> str:
    """Return text of a document of the repository with the links that it needs as a page."""

    def replace(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return found.group()
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (place := _place(inside)) is not None:
            return f"{mark}[{words}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{hash_}{anchor})"
        if not (ROOT / inside).exists():
            return found.group()  # which mkdocs complains about
        return f"`{inside}`" if words.strip("`") in (inside, posixpath.basename(inside)) else f"{words} (`{inside}`)"

    return LINK.sub(replace, text)


def _place(path: str) -> str | None:
    """Return where a file of the repository is on the site; None if it is not there."""
    if path in ADDED:
        return ADDED[path]
    if path.startswith("bench/results/") and path.endswith(".png"):
        return path
    if path.startswith(("docs/node", "docs/kubernetes/", "docs/site")):
        return None
    below = path.removeprefix("docs/")
    return below if below != path and (ROOT / path).is_file() and not path.endswith(".json") else None


# The settings of every command.


def settings() -> str:
    parts = [
        "# Settings\n\nGenerated from `seedrl/config.py` and `seedrl/algorithms/settings.py`. Every setting is "
        "`key=value` after a command; [the command line](../command-line.md) explains presets, lists and sweeps. "
        "`seedrl COMMAND "
        "--help` begins with those that people change.\n"
    ]
    of_run = {_facts(setting) for setting in settings_of(COMMANDS["run"].schema)}
    for name, command in COMMANDS.items():
        found = list(settings_of(command.schema))
        parts.append(f"\n## seedrl {name}\n\n{_sentence(command.meaning)}\n")
        if name != "run" and issubclass(command.schema, LearnerConfig):
            parts.append("\nIt has the settings of [`seedrl run`](#seedrl-run), apart from these:\n")
            found = [setting for setting in found if _facts(setting) not in of_run]
        parts += _sections(found)
    return "".join(parts)


def _facts(setting: Setting) -> tuple[str, str, str]:
    return setting.key, setting.shown, setting.meaning


def _sections(found: list[Setting]) -> Iterator[str]:
    """Yield a table of the settings without a section, and one per section."""
    sections: dict[str, list[Setting]] = {}
    for setting in found:
        sections.setdefault(setting.key.rpartition(".")[0].partition(".")[0], []).append(setting)
    for section, members in sorted(sections.items()):
        if len(sections) > 1 and section:
            yield f"\n### {section}\n"
        yield '\n<div class="settings" markdown>\n\n| setting | default | meaning |\n|---|---|---|\n'
        yield from (f"| `{each.key}` | `{_cell(each.shown)}` | {_cell(each.meaning)} |\n" for each in members)
        yield "\n</div>\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


# The protocol, from the comments of the proto.


def protocol(text: str) -> str:
    """Return the comments of a proto as a page: its head, then every service, message and enum with its fields."""
    head, _, rest = text.partition('syntax = "proto3";')
    parts = [
        "# Protocol\n\nGenerated from `proto/seedrl/v1/inference.proto`, which is all that a client needs; "
        "[actors in other languages](../protocol.md) has advice and an example.\n\n",
        _as_prose(_comment(head.splitlines())),
    ]
    return "".join([*parts, *_definitions(rest.splitlines())])


def _definitions(lines: list[str]) -> Iterator[str]:
    """Yield every service, message and enum with its members; one inside another comes after it."""
    open_ones: list[list[str]] = []  # the text of each, innermost last; a oneof writes to what it is in
    after: list[str] = []
    comment: list[str] = []
    for line in lines:
        word = line.strip()
        if word.startswith("//"):
            comment.append(word)
            continue
        if found := re.match(r"(?:service|message|enum) (\w+) \{", word):
            open_ones.append([f"\n## {found[1]}\n\n{' '.join(_comment(comment)) or ''}\n"])
        elif word.startswith("oneof "):
            open_ones.append(open_ones[-1])
        elif found := MEMBER.match(word):
            open_ones[-1].append(_member(found, _comment(comment)))
        if word.endswith("}"):
            done = open_ones.pop()
            if not open_ones:
                yield from (*done, *after)
                after = []
            elif done is not open_ones[-1]:
                after += done
        comment = []


def _member(found: re.Match[str], comment: list[str]) -> str:
    rpc, name, asked, answered, kind, field, number, beside = found.groups()
    words = " ".join([*comment, *([beside.strip()] if beside else [])])
    title = f"`rpc {name}({asked}) returns ({answered})`" if rpc else f"`{field}` = {number}"
    typed = f" *{kind.strip()}*" if not rpc and kind.strip() else ""
    return f"\n- {title}{typed}{': ' if words else ''}{_cell(words)}\n"


def _comment(lines: list[str]) -> list[str]:
    return [re.sub(r"^\s*// ?", "", line) for line in lines]


def _as_prose(lines: list[str]) -> str:
    """Return the head of the proto: pictures indented by four stay as they are, numbered rules become a list."""
    text = "\n".join(lines)
    text = re.sub(r"^(\d+)\. ", r"\n\1. ", text, flags=re.MULTILINE)
    text = re.sub(r"^(Rules)$", r"\n## \1\n", text, flags=re.MULTILINE)
    return re.sub(r"(?<=\S)\n(?= {4}actor)", "\n\n", text) + "\n"


# Python's side.

API: dict[str, list[Any]] = {
    "A trained policy": [seedrl.load],
    "A job": [job.Job, job_handle.SubmittedJob],
    "Environments": [envs_server.Actor, envs_server.check_env, envs_server.pool.Wrapper],
    "Spaces": [specs.ArraySpec, specs.CategoricalSpec, specs.ContinuousSpec, specs.EnvSpec, specs.discrete],
    "Models": [models.Model],
    "Algorithms": [algorithms.Algorithm, algorithms.Loss],
    "Selectors": [selection.Selector, selection.Pick],
}


def python_api() -> str:
    parts = ["# Python API\n\nGenerated from the docstrings. [From Python](../python.md) has examples, and "]
    parts.append("[algorithms](../algorithms.md) shows a class of each kind in full.\n")
    for title, members in API.items():
        parts.append(f"\n## {title}\n")
        parts += [_documented(member) for member in members]
    return "".join(parts)


def _documented(member: Any) -> str:
    name = f"{member.__module__}.{member.__name__}"
    text = f"\n### {member.__name__}\n\n```python\n{name}{_signature(member)}\n```\n\n{_doc(member)}\n"
    if inspect.isclass(member):
        for key, value in vars(member).items():
            if inspect.isfunction(value) and not key.startswith("_"):
                text += f"\n- `{key}{_signature(value)}`: {' '.join(_doc(value).split()) or 'see above.'}\n"
    return text


def _signature(member: Any) -> str:
    try:
        signature = inspect.signature(member)
    except (TypeError, ValueError):
        return "(…)"
    named = [each for key, each in signature.parameters.items() if key != "self"]
    kept = [each.replace(annotation=inspect.Parameter.empty) for each in named]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _doc(member: Any) -> str:
    """Return the docstring, with its indented programs as blocks."""
    text = inspect.cleandoc(member.__doc__ or "")
    return re.sub(r"(?m)^(class .*(?:\n(?: .*)?)*)", r"```python\n\1\n```", text)


def exit_codes() -> str:
    parts = [
        "# Exit codes\n\nGenerated from `seedrl/errors.py`. A command prints one line that says what happened, what "
        "was seen and what to change, and exits with the code of the error. [What happens when something "
        "fails](../failures.md) says which of them are tried again.\n\n| code | error | meaning |\n|--:|---|---|\n",
        "| 0 | | done, or interrupted cleanly |\n| 1 | | anything else, such as too many crashes |\n",
    ]
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        if found := re.match(r"[\s│├└─]*(\w+)\s{2,}(.*?)\s+exit (\d+)$", line):
            parts.append(f"| {found[3]} | `{found[1]}` | {found[2]} |\n")
    return "".join([*parts, "| 128 + n | | ended by signal n |\n"])
