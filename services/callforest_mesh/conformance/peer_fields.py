"""Field types of the capture contract's records, as strict as a peer's (capture contract 1.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from callforest_core.custody.digests import CONTINUATION_MODE, ROOT_MODE, FloatColumn
from callforest_core.custody.tokens import WideTokenIds
from callforest_mesh.conformance.json_case import Json

T = TypeVar("T")

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHITE_SPACE: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_SELECTIONS: Final = frozenset({"declared", "response_id", "content", "heuristic"})


class PeerParseError(ValueError):
    """A peer refuses to construct this record."""


class PeerFields:
    """The fields of one JSON object, taken one by one; what is left over is refused."""

    def __init__(self, value: Json) -> None:
        if not isinstance(value, dict):
            raise PeerParseError(f"not an object but {type(value).__name__}")
        self._left = dict(value)

    def take(self, name: str, parse: Callable[[Json], T]) -> T:
        """Take a required field.

        Raises:
            PeerParseError: it is missing or not of its type.
        """
        if name not in self._left:
            raise PeerParseError(f"{name} is missing")
        try:
            return parse(self._left.pop(name))
        except PeerParseError as error:
            raise PeerParseError(f"{name}: {error}") from error

    def take_or(self, name: str, parse: Callable[[Json], T], default: T) -> T:
        """Take an optional field; null counts as present.

        Raises:
            PeerParseError: it is not of its type.
        """
        return self.take(name, parse) if name in self._left else default

    def finish(self) -> None:
        """Refuse fields that nobody took.

        Raises:
            PeerParseError: there are some.
        """
        if self._left:
            raise PeerParseError(f"unknown fields {sorted(self._left)}")


def nullable(parse: Callable[[Json], T]) -> Callable[[Json], T | None]:
    """Make a type that also admits null."""
    return lambda value: None if value is None else parse(value)


def text(value: Json) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise PeerParseError(f"not a string: {value!r}")
    return value


def identifier(value: Json) -> str:
    """A string that is not empty and is valid Unicode."""
    name = text(value)
    if not name or any("\ud800" <= character <= "\udfff" for character in name):
        raise PeerParseError(f"not an identifier: {name!r}")
    return name


def length(value: Json) -> int:
    """An integer from 0 on, without an upper bound; not a bool, not a float."""
    if type(value) is not int or value < 0:
        raise PeerParseError(f"not a non-negative integer: {value!r}")
    return value


def version(value: Json) -> int:
    """A version number: an integer or a float of integer value."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise PeerParseError(f"not a version: {value!r}")


def raw_digest(value: Json) -> bytes:
    """Return 64 lowercase hexadecimal digits as 32 bytes."""
    digits = text(value)
    if not _DIGEST.fullmatch(digits):
        raise PeerParseError(f"not a digest: {digits!r}")
    return bytes.fromhex(digits)


def mode(value: Json) -> str:
    """One of the capture modes."""
    name = text(value)
    if name not in (ROOT_MODE, CONTINUATION_MODE):
        raise PeerParseError(f"not a capture mode: {name!r}")
    return name


def terminal_selection(value: Json) -> str:
    """One of the attribution methods that a receipt can name."""
    method = text(value)
    if method not in _SELECTIONS:
        raise PeerParseError(f"not an attribution method: {method!r}")
    return method


def elements(value: Json) -> list[Json]:
    """A list."""
    if not isinstance(value, list):
        raise PeerParseError(f"not a list: {value!r}")
    return value


def flag(value: Json) -> bool:
    """A bool, leniently: also 0, 1 and the usual words."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    word = value.lower() if isinstance(value, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise PeerParseError(f"not a flag: {value!r}")


def strict_float(value: Json) -> float:
    """A finite number, as a double; not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PeerParseError(f"not a number: {value!r}")
    try:
        number = float(value)
    except OverflowError as error:
        raise PeerParseError(f"not a double: {value!r}") from error
    if not math.isfinite(number):
        raise PeerParseError(f"not finite: {value!r}")
    return number


def lenient_float(value: Json) -> float:
    """A finite number, leniently: also a bool or a numeric string."""
    if isinstance(value, bool):
        return float(value)
    return _number_in(value) if isinstance(value, str) else strict_float(value)


def _number_in(value: str) -> float:
    digits = value.strip(_WHITE_SPACE)
    if not (digits.startswith("_") or digits.endswith("_") or "__" in digits):
        digits = digits.replace("_", "")
    if not _NUMBER.fullmatch(digits):
        raise PeerParseError(f"not a number: {value!r}")
    return strict_float(float(digits))


def token_ids(value: Json) -> WideTokenIds:
    """A list of integers in [0, 2^64)."""
    ids = [length(element) for element in elements(value)]
    if ids and max(ids) >= 2**64:
        raise PeerParseError(f"an id is 2^64 or more: {max(ids)}")
    return np.array(ids, dtype=np.uint64)


def floats(value: Json) -> FloatColumn:
    """A list of finite numbers."""
    return np.array([strict_float(element) for element in elements(value)], dtype=np.float64)
