"""The programs in the documents, as they are printed there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def program(name: str, document: str) -> str:
    """Return the block of a document that begins with the comment `# name`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if block.startswith(f"# {name}\n")]
    return found


def write_program(name: str, document: str, directory: Path) -> Path:
    path = directory / name
    path.write_text(program(name, document))
    return path
