"""Says fast that a message plainly keeps the rules of its schema; what it doubts, others judge.

protovalidate serializes a message, reads it again and runs its expressions, which costs more than
all else that is done with a small item. Nearly every message is valid, so here the schema's own
rules, of the few kinds that items use, are written as one Python expression and compiled once. It
is true only when no rule can be broken. A kind of rule that is not known here, or a message in
doubt, is for protovalidate, which also says what is wrong.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from buf.validate import validate_pb2

Holds: TypeAlias = Callable[[Message], bool]
"""Whether a message plainly keeps its rules."""

# The one shape of pattern that Python's expressions certainly take as RE2 does.
_PATTERN: Final = re.compile(r"\^(\[[A-Za-z0-9._~!-]+\](?:\+|\{0,[0-9]+\}))\$")
_SIZES: Final = frozenset({"len", "min_len", "max_len"})
_BOUNDS: Final = frozenset({"gt", "gte", "lt", "lte"})

_MESSAGE_EXPRESSIONS: Final = {
    "has(this.parent_call_id) == (this.prev_token_count > 0u)": (
        "{this}.HasField('parent_call_id') == ({this}.prev_token_count > 0)"
    ),
    "uint(size(this.token_ids)) == uint(this.carry_token_count) * 4u + uint(size(this.logprobs))": (
        "len({this}.token_ids) == {this}.carry_token_count * 4 + len({this}.logprobs)"
    ),
    "uint(size(this.context_digests)) == (uint(this.item_count) + 1u) * 32u": (
        "len({this}.context_digests) == ({this}.item_count + 1) * 32"
    ),
}
_BYTES_EXPRESSIONS: Final = {
    "size(this) % 4 == 0": "{size} % 4 == 0",
    "size(this) == 0 || size(this) == 32": "{size} in (0, 32)",
}


class _UnknownRuleError(Exception):
    """The schema has a rule of a kind that is not known here."""


def plain_check(descriptor: Descriptor) -> Holds | None:
    """Make the check of a message's rules; None when one of them is not known here."""
    writer = _Writer()
    try:
        tests = writer.message("message", descriptor, ())
    except _UnknownRuleError:
        return None
    # The text is made of the schema's field names and numbers alone.
    return cast("Holds", eval(f"lambda message: {_all(tests)}", writer.names))  # noqa: S307


class _Writer:
    """Writes the tests of messages; all of one message's must be true.

    Attributes:
        names: what the tests refer to besides the message.
    """

    def __init__(self) -> None:
        self.names: dict[str, object] = {}
        self._sizes: dict[str, str] = {}
        self._variables = 0

    def message(self, this: str, descriptor: Descriptor, within: tuple[str, ...]) -> list[str]:
        """Write the tests of the message that is called `this`, `within` others."""
        if descriptor.full_name in within:
            raise _UnknownRuleError  # a message within itself has no end
        within = (*within, descriptor.full_name)
        rules = descriptor.GetOptions().Extensions[validate_pb2.message]
        _known(rules, {"cel"})
        tests = []
        for group in descriptor.oneofs:
            required = group.GetOptions().Extensions[validate_pb2.oneof]
            _known(required, {"required"})
            if required.required:
                tests.append(f"{this}.WhichOneof({group.name!r}) is not None")
        for field in descriptor.fields:
            tests += self._field(this, field, within)
        for one in rules.cel:
            tests.append(
                self._known_sizes(_expression(_MESSAGE_EXPRESSIONS, one.expression, this=this))
            )
        return tests

    def _known_sizes(self, test: str) -> str:
        """Take the sizes that earlier tests have found: each look at a field of bytes copies it."""
        for size, variable in self._sizes.items():
            test = test.replace(size, variable)
        return test

    def _field(self, this: str, field: FieldDescriptor, within: tuple[str, ...]) -> list[str]:
        rules = field.GetOptions().Extensions[validate_pb2.field]
        if keyword.iskeyword(field.name) or (rules.required and not field.has_presence):
            raise _UnknownRuleError
        value, has = f"{this}.{field.name}", f"{this}.HasField({field.name!r})"
        if field.message_type is None:
            test = self._value(value, field, rules)
        else:
            _known(rules, {"required"} if field.has_presence else {"repeated"})
            inner = self._variable()
            tests = self.message(inner, field.message_type, within)
            if field.has_presence:
                test = _all([f"({inner} := {value}) is not None", *tests]) if tests else ""
            else:
                test = _list(value, inner, tests, field.message_type, rules)
        if rules.required:
            return [has, test] if test else [has]
        if not test:
            return []
        return [f"(not {has} or {test})" if field.has_presence else test]

    def _value(self, value: str, field: FieldDescriptor, rules: validate_pb2.FieldRules) -> str:
        """Write the test of a value that is no message; "" when it has no rule."""
        kind = rules.WhichOneof("type")
        _known(rules, {"required", "cel", kind or ""})
        if kind is None and not rules.cel:
            return ""
        if kind == "repeated":
            return self._repeated(value, rules.repeated)
        if field.is_repeated:
            raise _UnknownRuleError
        if kind == "string" and not rules.cel:
            return self._string(value, rules.string)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes(value, rules)
        if kind in ("uint32", "uint64") and not rules.cel:
            return _within(value, *_bounds(getattr(rules, kind)))
        if kind == "enum" and not rules.cel:
            _known(rules.enum, {"not_in"})
            return f"{value} not in {(*rules.enum.not_in,)!r}"
        raise _UnknownRuleError

    def _repeated(self, value: str, rules: validate_pb2.RepeatedRules) -> str:
        """Write the test of a list of values; of their own rules those of strings are known."""
        _known(rules, {"max_items", "items"})
        if not rules.HasField("items"):
            return _few(value, rules)
        _known(rules.items, {"string"})
        if not rules.items.HasField("string"):
            raise _UnknownRuleError
        one = self._variable()
        test = self._string(one, rules.items.string)
        return _all([_few(value, rules), f"all({test} for {one} in {value})"])

    def _string(self, value: str, rules: validate_pb2.StringRules) -> str:
        _known(rules, {*_SIZES, "pattern"})
        least, most = _sizes(rules)
        if not rules.HasField("pattern"):
            return _within(f"len({value})", least, most)
        pattern = _PATTERN.fullmatch(rules.pattern)
        if pattern is None:
            raise _UnknownRuleError
        text, matches = self._variable(), f"matches_{len(self.names)}"
        self.names[matches] = re.compile(pattern[1], re.ASCII).fullmatch
        sized = _within(f"len({text} := {value})", least, most)
        return f"{sized} and {matches}({text}) is not None"

    def _bytes(self, value: str, rules: validate_pb2.FieldRules) -> str:
        _known(rules.bytes, _SIZES)
        least, most = _sizes(rules.bytes)
        size = self._variable()
        self._sizes[f"len({value})"] = size
        return _all(
            [
                _within(f"({size} := len({value}))", least, most),
                *(_expression(_BYTES_EXPRESSIONS, one.expression, size=size) for one in rules.cel),
            ]
        )

    def _variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"


def _all(tests: list[str]) -> str:
    return f"({' and '.join(tests)})" if tests else "True"


def _list(
    value: str, inner: str, tests: list[str], kind: Descriptor, rules: validate_pb2.FieldRules
) -> str:
    """Write the test of a list of messages, `inner` each; "" when it has no rule."""
    if kind.GetOptions().map_entry:
        raise _UnknownRuleError
    both = [f"all({_all(tests)} for {inner} in {value})"] if tests else []
    if rules.HasField("repeated"):
        _known(rules.repeated, {"max_items"})
        both = [_few(value, rules.repeated), *both]
    return _all(both) if both else ""


def _within(value: str, least: int, most: int) -> str:
    """Write the test of a number's bounds that can be broken; a size or an unsigned number is."""
    if least == most:
        return f"{value} == {least}"
    lower = f"{least} <= " if least > 0 else ""
    return f"{lower}{value} <= {most}"


def _few(value: str, rules: validate_pb2.RepeatedRules) -> str:
    return f"len({value}) <= {rules.max_items}"


def _bounds(rules: validate_pb2.UInt32Rules | validate_pb2.UInt64Rules) -> tuple[int, int]:
    _known(rules, _BOUNDS)
    least = rules.gte if rules.HasField("gte") else 0
    least = rules.gt + 1 if rules.HasField("gt") else least
    most = rules.lte if rules.HasField("lte") else 2**64
    most = rules.lt - 1 if rules.HasField("lt") else most
    if least > most:
        raise _UnknownRuleError  # then a value outside the gap is meant
    return least, most


def _sizes(rules: validate_pb2.StringRules | validate_pb2.BytesRules) -> tuple[int, int]:
    if rules.HasField("len"):
        return rules.len, rules.len
    return rules.min_len, rules.max_len if rules.HasField("max_len") else 2**63


def _expression(known: Mapping[str, str], text: str, **names: str) -> str:
    try:
        return f"({known[text].format(**names)})"
    except KeyError:
        raise _UnknownRuleError from None


def _known(rules: Message, names: set[str] | frozenset[str]) -> None:
    """Refuse rules beside those that are known.

    Raises:
        _UnknownRuleError: there are some.
    """
    if any(field.name not in names for field, _ in rules.ListFields()):
        raise _UnknownRuleError
