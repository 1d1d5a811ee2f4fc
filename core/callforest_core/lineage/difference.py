"""Where two histories part, and in what sense: for people, never for a verdict.

A call that began a context of its own is explained by its first atom that the recorded history
does not have (docs/lineage.md, section 11, "Difference"). Places and classes are named, no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Final, NamedTuple, TypeAlias

from callforest.capture.v1 import call_record_pb2 as pb
from callforest_core.lineage.atom import AtomKind, fields_of
from callforest_core.lineage.canonical_json import canonical_json
from callforest_core.lineage.source import effective_options

DifferenceClass: TypeAlias = pb.DifferenceClass.ValueType

_WITH_REST: Final = frozenset({AtomKind.MESSAGE, AtomKind.RESULT})
_ARGUMENTS: Final = 2
_DAYS: Final = "mon|tue|wed|thu|fri|sat|sun"
_LONG_DAYS: Final = "monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_MONTHS: Final = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_LONG_MONTHS: Final = (
    "january|february|march|april|june|july|august|september|october|november|december"
)
_VOLATILE: Final = re.compile(
    rf"\b(?:{_DAYS}|{_LONG_DAYS}|{_MONTHS}|{_LONG_MONTHS}|am|pm|utc|gmt)\b"
    r"|\b(?=[a-f]*\d)[0-9a-f]{6,}\b|\d+",
    re.IGNORECASE,
)


_CERTAINTY: Final[Mapping[DifferenceClass, int]] = {
    kind: place
    for place, kind in enumerate(
        (
            pb.DIFFERENCE_CLASS_UNSPECIFIED,
            pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY,
            pb.DIFFERENCE_CLASS_SYSTEM_TEXT,
            pb.DIFFERENCE_CLASS_VOLATILE_HEADER,
            pb.DIFFERENCE_CLASS_EXTRA_KEYS,
            pb.DIFFERENCE_CLASS_JSON,
            pb.DIFFERENCE_CLASS_WHITESPACE,
            pb.DIFFERENCE_CLASS_REASONING_MISSING,
        )
    )
}
"""Classes of histories, the least certain first. Two calls that have nothing to do with each other
differ in system text or rewritten history; that they are equal but for white space, or that all
that follows is equal, is no accident; masked digits can be one."""


class Difference(NamedTuple):
    """The first place in which a history is another; `atom_index` counts from 0."""

    kind: DifferenceClass
    atom_index: int


class OptionDifference(NamedTuple):
    """The first option, by name, in which two renderings differ."""

    kind: DifferenceClass
    name: str


def difference(recorded: Iterable[bytes], sent: Iterable[bytes]) -> Difference | None:
    """Compare a request's atoms with those of a recorded history.

    Returns None when the request has the whole recorded history and goes on with another item.
    Costs the common part, or both histories where an item has keys that the other's lacks.
    """
    known_atoms, other_atoms = iter(recorded), iter(sent)
    count = 0
    for known in known_atoms:
        other = next(other_atoms, None)
        if other is None:
            return Difference(pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY, count)
        if known != other:
            kind = _class_at(known, known_atoms, other, other_atoms)
            return Difference(kind, count)
        count += 1
    other = next(other_atoms, None)
    if count and other is not None and other[0] == AtomKind.REST:
        # More keys of an item that the recorded history ends with.
        return Difference(pb.DIFFERENCE_CLASS_EXTRA_KEYS, count)
    return None


def _class_at(
    known: bytes, known_atoms: Iterator[bytes], other: bytes, other_atoms: Iterator[bytes]
) -> DifferenceClass:
    """Name the difference of two histories that differ in these atoms and go on with the others."""
    if AtomKind.REST in {known[0], other[0]}:
        if _goes_on_without_rest([known, *known_atoms], [other, *other_atoms]):
            return pb.DIFFERENCE_CLASS_EXTRA_KEYS
    elif known[0] == AtomKind.REASONING and _goes_on(known_atoms, other, other_atoms):
        return pb.DIFFERENCE_CLASS_REASONING_MISSING
    return _class_of(known, other)


def _goes_on_without_rest(known_atoms: list[bytes], other_atoms: list[bytes]) -> bool:
    """Say whether the second begins with the first, but for keys that no rule reads."""
    known, other = (
        [atom for atom in atoms if atom[0] != AtomKind.REST] for atoms in (known_atoms, other_atoms)
    )
    return known == other[: len(known)]


def _goes_on(known: Iterator[bytes], other: bytes, others: Iterator[bytes]) -> bool:
    """Say whether the rest is equal but for reasoning that is recorded and was not sent."""
    sent: bytes | None = other
    for atom in known:
        if atom == sent:
            sent = next(others, None)
        elif atom[0] != AtomKind.REASONING:
            return False
    return True


def certainty(kind: DifferenceClass) -> int:
    """Say how sure it is that histories that differ so have to do with each other; larger is surer.

    Of several histories that share equally much with a request, the surest is the one it left.
    """
    return _CERTAINTY.get(kind, 0)


def option_difference(
    recorded: Mapping[str, object], sent: Mapping[str, object]
) -> OptionDifference | None:
    """Compare two sets of render options; null, empty and absent are equal."""
    known, other = effective_options(recorded), effective_options(sent)
    for name, value in known.items():
        # As JSON, in which true is no 1.
        if canonical_json(value) != canonical_json(other[name]):
            is_tool = name == "tools"
            kind = pb.DIFFERENCE_CLASS_TOOL_SET if is_tool else pb.DIFFERENCE_CLASS_TEMPLATE
            return OptionDifference(kind, name)
    return None


def _class_of(known: bytes, other: bytes) -> DifferenceClass:
    """Name the difference of two atoms: first how they are spelt, then what they are."""
    kind, fields = fields_of(known)
    other_kind, other_fields = fields_of(other)
    if kind == other_kind and len(fields) == len(other_fields):
        pairs = zip(fields, other_fields, strict=True)
        changed = {place: pair for place, pair in enumerate(pairs) if pair[0] != pair[1]}
        if kind in _WITH_REST and set(changed) == {len(fields) - 1}:
            return pb.DIFFERENCE_CLASS_EXTRA_KEYS
        if kind == AtomKind.CALL and set(changed) == {_ARGUMENTS}:
            if _equal_values(*changed[_ARGUMENTS]):
                return pb.DIFFERENCE_CLASS_JSON
        elif kind not in {AtomKind.CALL, AtomKind.RESULT} or 0 not in changed:
            if _all_equal(changed.values(), _without_space):
                return pb.DIFFERENCE_CLASS_WHITESPACE
            if _all_equal(changed.values(), _without_volatile):
                return pb.DIFFERENCE_CLASS_VOLATILE_HEADER
    if _is_system(kind, fields) or _is_system(other_kind, other_fields):
        return pb.DIFFERENCE_CLASS_SYSTEM_TEXT
    return pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY


def _is_system(kind: AtomKind, fields: list[str]) -> bool:
    return kind == AtomKind.MESSAGE and fields[0] == "system"


def _all_equal(pairs: Iterable[tuple[str, str]], form: Callable[[str], str]) -> bool:
    return all(form(known) == form(other) for known, other in pairs)


def _without_space(text: str) -> str:
    return "".join(text.split())


def _without_volatile(text: str) -> str:
    return _VOLATILE.sub("#", text)


def _equal_values(known: str, other: str) -> bool:
    """Compare two JSON texts by value: of a repeated key the last counts, and 1 is 1.0."""
    try:
        return _values(known) == _values(other)
    except (ValueError, ArithmeticError, RecursionError):
        return False


def _values(text: str) -> object:
    # A number is a pair, so that it equals neither `true` nor a list.
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(digits: str) -> tuple[str, Decimal]:
    return "number", Decimal(digits)
