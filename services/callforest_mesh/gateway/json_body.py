"""A request's body as JSON that every reader takes alike.

A body that two parsers could read differently (keys twice, numbers out of range, more nesting than
a stack holds) is refused before anything is decided by it.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Final

from callforest_core.lineage.items import Item
from callforest_core.lineage.strict_json import (
    LEVELS_MAX,
    AmbiguousJsonError,
    finite_number,
    is_deep,
    no_constant,
    unique_keys,
)
from callforest_mesh.gateway.refusals import malformed

_MARSHAL_VERSION: Final = 2
"""The last version in which equal values are always equal bytes, and others never: later ones write
what came before as a reference."""
_LIST_HEAD: Final = 5
_WHITESPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = JSONDecoder(
    object_pairs_hook=unique_keys, parse_constant=no_constant, parse_float=finite_number
)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A request's body, parsed.

    Attributes:
        body: as received.
        text: the same, decoded.
        fields: what it holds.
        places: where each field's value begins and ends in `text`, in characters.
    """

    body: bytes
    text: str
    fields: Item
    places: Mapping[str, tuple[int, int]]

    def place_of(self, name: str) -> tuple[int, int]:
        """Give where the value of a field begins and ends in `body`, in bytes.

        Raises:
            KeyError: it has no such field.
        """
        begin, end = self.places[name]
        if len(self.text) == len(self.body):
            return begin, end
        before = len(self.text[:begin].encode())
        return before, before + len(self.text[begin:end].encode())


def parse_body(body: bytes) -> Item:
    """Parse a request's body; raises what `read_body` does."""
    return read_body(body).fields


def read_body(body: bytes) -> Body:
    """Parse a request's body, and say where its fields are.

    Raises:
        HttpRefusal: it is no JSON object, or not one that every reader takes alike.
    """
    try:
        text = body.decode("utf-8")
        fields, places = _read_object(text)
    except RecursionError as error:
        raise malformed(f"The body is nested more than {LEVELS_MAX} deep.") from error
    except ValueError as error:
        raise malformed(f"The body is not valid JSON: {_fault(error)}.") from error
    if fields is None:
        raise malformed("The body must be a JSON object.")
    if is_deep(text, fields):
        raise malformed(f"The body is nested more than {LEVELS_MAX} deep.")
    return Body(body, text, fields, places)


def read_values(written: bytes) -> list[object] | None:
    """Parse values as they stand in a list of a body's, without its brackets.

    None when they are none, or not such that every reader takes alike.
    """
    try:
        text = f"[[{written.decode()}]]"  # in as many brackets as in the body
        lists: list[list[object]] = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return None if len(lists) != 1 or is_deep(text, lists) else lists[0]


def _fault(error: ValueError) -> str:
    """Say what is wrong with a body, in words of our own: those of Python say what Python does."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not of UTF-8"
    if isinstance(error, JSONDecodeError):
        return f"character {error.pos} is not what must stand there"
    if isinstance(error, AmbiguousJsonError):
        return str(error)
    return "an integer has more digits than any reader takes"


def _read_object(text: str) -> tuple[Item | None, dict[str, tuple[int, int]]]:
    """Parse a JSON object, and say where its values are; None for other valid JSON.

    The library's decoder says where a value ends, but only of the value that it is given. So it is
    given those of the outermost object one by one.

    Raises:
        ValueError: the text is no JSON.
    """
    at = _behind_space(text, 0)
    if not text.startswith("{", at):
        _DECODER.decode(text)
        return None, {}
    pairs: list[tuple[str, object]] = []
    places: dict[str, tuple[int, int]] = {}
    at = _behind_space(text, at + 1)
    is_open = not text.startswith("}", at)
    while is_open:
        if not text.startswith('"', at):
            raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _DECODER.raw_decode(text, at)
        at = _behind_space(text, at)
        if not text.startswith(":", at):
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        begin = _behind_space(text, at + 1)
        value, end = _DECODER.raw_decode(text, begin)
        pairs.append((name, value))
        places[name] = begin, end
        at = _behind_space(text, end)
        is_open = text.startswith(",", at)
        if is_open:
            at = _behind_space(text, at + 1)
        elif not text.startswith("}", at):
            raise JSONDecodeError("Expecting ',' delimiter", text, at)
    at = _behind_space(text, at + 1)
    if at != len(text):
        raise JSONDecodeError("Extra data", text, at)
    return unique_keys(pairs), places


def _behind_space(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    return found.end() if found else at


def write_json(value: object) -> bytes:
    """Write JSON without white space; ASCII, since half a surrogate pair has no UTF-8 form."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def write_items(items: Sequence[object]) -> bytes:
    """Write values as they stand in a JSON list, without its brackets."""
    return write_json(items)[1:-1]


def exact_bytes(values: list[object]) -> memoryview:
    """Write parsed JSON as bytes that are equal for equal values alone; a list's without its head.

    Types and the order of keys count. The writer of the standard library's own bytes is some ten
    times as fast as that of JSON.
    """
    return memoryview(marshal.dumps(values, _MARSHAL_VERSION))[_LIST_HEAD:]
