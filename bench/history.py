"""`seedrl bench guard HISTORY.jsonl FILE.json`: compares results with those of earlier nights on the same machine.

The history has one line per run of the bench that was not worse, so that a slow decline cannot become the new normal.
Measures nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare import WORSE, Change, table_of
from bench.document import Document, document_of, read
from bench.harness import Ratio
from seedrl.errors import ConfigError

NIGHTS = 5  # earlier runs whose repeats are compared with the new ones
SAME_MACHINE = ("cpu", "cores", "platform")


def guard(history: Path, new: Path) -> int:
    """Print the verdicts and add the new results unless something is worse. The exit code: 1 if something is."""
    document = read(new)
    before = [each for each in read_history(history) if _machine(each) == _machine(document)][-NIGHTS:]
    changes = [Change(joined, ratio) for ratio in document.ratios.values() if (joined := _joined(before, ratio.name))]
    print(f"compared with {len(before)} earlier runs on this machine")
    print(table_of(changes))
    worse = [change.after.name for change in changes if change.verdict == WORSE]
    if worse:
        print(f"worse: {', '.join(worse)}; the history stays as it is")
        return 1
    with history.open("a") as file:
        file.write(json.dumps(json.loads(new.read_text())) + "\n")
    print(f"nothing is worse; added to {history}")
    return 0


def read_history(path: Path) -> list[Document]:
    """Return the documents of a history, oldest first; none if there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [document_of(_parsed(line, f"{path}, line {number}")) for number, line in enumerate(lines, 1)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}; remove the line, or begin another history") from error
    return content


def _machine(document: Document) -> list[Any]:
    return [document.fingerprint.get(key) for key in SAME_MACHINE]


def _joined(before: Sequence[Document], name: str) -> Ratio | None:
    """Return a ratio with the repeats of all earlier runs; None if none of them has it."""
    found = [document.ratios[name] for document in before if name in document.ratios]
    if not found:
        return None
    return Ratio(name, [value for each in found for value in each.values], found[-1].bound, found[-1].at_most)
