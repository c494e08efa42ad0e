"""Settings written as overrides of a command line, `key=value`, in Hydra's grammar. Does not import Hydra.

Every process that starts another one, and `Job`, write their settings through this module.
"""

import re
from collections.abc import Sequence
from typing import Any

_BEFORE_QUOTE = re.compile(r"(\\*)('|\Z)")


def override(key: str, value: Any) -> str:
    """Return the override that gives a setting exactly this value."""
    return f"{key}={literal(value)}"


def literal(value: Any) -> str:
    """Return a value as Hydra's grammar spells it; strings are always quoted."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Sequence):
        return f"[{','.join(map(literal, value))}]"
    return str(value)


def _quoted(text: str) -> str:
    """Escape quotes, and those backslashes that stand before a quote: elsewhere Hydra takes them as they are."""
    escaped = _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + found[2].replace("'", r"\'"), text)
    return f"'{escaped}'"
