"""Overrides mean to Hydra's own parser what was written into them."""

import math
import string
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import example, given
from hypothesis import strategies as st

from seedrl.launching.overrides import override

TRICKY = st.text(st.sampled_from("'\"\\,=[]{}$ a:/\n\t()%~+"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TRICKY
    | st.text(string.printable)
    | st.text()
)
VALUES = st.recursive(SCALARS, lambda values: st.lists(values, max_size=4), max_leaves=8)


def parsed(text: str) -> Any:
    found = OverridesParser.create().parse_override(text)
    assert found.get_key_element() == "key"
    return found.value()


@given(VALUES)
@example("runs/it's here")
@example("ends with a backslash\\")
@example("\\'")
@example("a,b")
@example("")
@example(math.inf)
def test_override_is_parsed_by_hydra_to_the_value_it_was_made_of(value: Any) -> None:
    assert parsed(override("key", value)) == value


@given(SCALARS)
def test_override_of_a_string_stays_a_string_and_of_nothing_else_becomes_one(value: Any) -> None:
    raw = OverridesParser.create().parse_override(override("key", value)).value()
    assert isinstance(raw, str | QuotedString) is isinstance(value, str)
