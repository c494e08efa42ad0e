"""The programs in README.md, as they are printed there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def program(name: str) -> str:
    """The block that begins with the comment `# name`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if block.startswith(f"# {name}\n")]
    return found


def write_program(name: str, directory: Path) -> Path:
    path = directory / name
    path.write_text(program(name))
    return path
