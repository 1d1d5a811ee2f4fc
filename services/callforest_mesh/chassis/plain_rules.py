"""Says fast that a message plainly keeps the rules of its schema; what it doubts, others judge.

protovalidate serializes a message, reads it again and runs its expressions, which costs more than
all else that is done with a small item. Nearly every message is valid, so here a check is made of
the schema's own rules, of the few kinds that items use. It answers True only when no rule can be
broken. A kind of rule that is not known here, or a message in doubt, is for protovalidate, which
also says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from buf.validate import validate_pb2

Holds: TypeAlias = Callable[[Message], bool]
"""Whether a message plainly keeps its rules."""
_Test: TypeAlias = Callable[[object], bool]

# The one shape of pattern that Python's expressions certainly take as RE2 does.
_PATTERN: Final = re.compile(r"\^(\[[A-Za-z0-9._~!-]+\](?:\+|\{0,[0-9]+\}))\$")
_SIZES: Final = frozenset({"len", "min_len", "max_len"})
_BOUNDS: Final = frozenset({"gt", "gte", "lt", "lte"})

_MESSAGE_EXPRESSIONS: Final[dict[str, Callable[..., bool]]] = {
    "has(this.parent_call_id) == (this.prev_token_count > 0u)": lambda this: (
        this.HasField("parent_call_id") == (this.prev_token_count > 0)
    ),
    "uint(size(this.token_ids)) == uint(this.carry_token_count) * 4u + uint(size(this.logprobs))": (
        lambda this: len(this.token_ids) == this.carry_token_count * 4 + len(this.logprobs)
    ),
    "uint(size(this.context_digests)) == (uint(this.item_count) + 1u) * 32u": lambda this: (
        len(this.context_digests) == (this.item_count + 1) * 32
    ),
}
_BYTES_EXPRESSIONS: Final[dict[str, Callable[[int], bool]]] = {
    "size(this) % 4 == 0": lambda size: size % 4 == 0,
    "size(this) == 0 || size(this) == 32": lambda size: size in (0, 32),
}


class _UnknownRuleError(Exception):
    """The schema has a rule of a kind that is not known here."""


def plain_check(descriptor: Descriptor) -> Holds | None:
    """Make the check of a message's rules; None when one of them is not known here."""
    try:
        return _message_check(descriptor, ())
    except _UnknownRuleError:
        return None


def _message_check(descriptor: Descriptor, within: tuple[str, ...]) -> Holds:
    """Make the check of a message, `within` others."""
    if descriptor.full_name in within:
        raise _UnknownRuleError  # a message within itself has no end
    within = (*within, descriptor.full_name)
    rules = descriptor.GetOptions().Extensions[validate_pb2.message]
    _known(rules, {"cel"})
    checks: list[Holds] = [_expression(_MESSAGE_EXPRESSIONS, one.expression) for one in rules.cel]
    for group in descriptor.oneofs:
        required = group.GetOptions().Extensions[validate_pb2.oneof]
        _known(required, {"required"})
        if required.required:
            checks.append(_some_of(group.name))
    for field in descriptor.fields:
        checks += _field_checks(field, within)
    return _all_of(checks)


def _field_checks(field: FieldDescriptor, within: tuple[str, ...]) -> list[Holds]:
    rules = field.GetOptions().Extensions[validate_pb2.field]
    get = attrgetter(field.name)
    checks: list[Holds] = []
    if rules.required:
        if not field.has_presence:
            raise _UnknownRuleError
        checks.append(_presence_of(field.name))
    if field.message_type is not None:
        _known(rules, {"required"} if field.has_presence else {"repeated"})
        inner = _message_check(field.message_type, within)
        if not field.has_presence:
            if field.message_type.GetOptions().map_entry:
                raise _UnknownRuleError
            if rules.HasField("repeated"):
                _known(rules.repeated, {"max_items"})
                most = rules.repeated.max_items
                checks.append(lambda message: len(get(message)) <= most)
            if inner is not _always:
                checks.append(lambda message: all(inner(one) for one in get(message)))
            return checks
        if inner is _always:
            return checks
        test = cast("_Test", inner)
    else:
        made = _value_test(field, rules)
        if made is None:
            return checks
        test = made
    if field.has_presence:
        has = _presence_of(field.name)
        checks.append(lambda message: not has(message) or test(get(message)))
    else:
        checks.append(lambda message: test(get(message)))
    return checks


def _value_test(field: FieldDescriptor, rules: validate_pb2.FieldRules) -> _Test | None:
    """Make the test of a value that is no message; None when it has no rule."""
    kind = rules.WhichOneof("type")
    _known(rules, {"required", "cel", kind or ""})
    if kind is None and not rules.cel:
        return None
    if kind == "repeated":
        return _repeated_test(rules.repeated)
    if field.is_repeated:
        raise _UnknownRuleError
    if kind == "string" and not rules.cel:
        return _string_test(rules.string)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes_test(rules)
    if kind in ("uint32", "uint64") and not rules.cel:
        return _integer_test(getattr(rules, kind))
    if kind == "enum" and not rules.cel:
        _known(rules.enum, {"not_in"})
        refused = frozenset(rules.enum.not_in)
        return lambda value: value not in refused
    raise _UnknownRuleError


def _repeated_test(rules: validate_pb2.RepeatedRules) -> _Test:
    """Make the test of a list of values; of their own rules those of strings are known."""
    _known(rules, {"max_items", "items"})
    most = rules.max_items
    if not rules.HasField("items"):
        return lambda value: len(cast("Sequence[object]", value)) <= most
    _known(rules.items, {"string"})
    one_holds = _string_test(rules.items.string)

    def test(value: object) -> bool:
        values = cast("Sequence[object]", value)
        return len(values) <= most and all(one_holds(one) for one in values)

    return test


def _string_test(rules: validate_pb2.StringRules) -> _Test:
    _known(rules, {*_SIZES, "pattern"})
    least, most = _sizes(rules)
    if not rules.HasField("pattern"):
        return lambda value: least <= len(cast("str", value)) <= most
    pattern = _PATTERN.fullmatch(rules.pattern)
    if pattern is None:
        raise _UnknownRuleError
    matches = re.compile(pattern[1], re.ASCII).fullmatch

    def test(value: object) -> bool:
        text = cast("str", value)
        return least <= len(text) <= most and matches(text) is not None

    return test


def _bytes_test(rules: validate_pb2.FieldRules) -> _Test:
    _known(rules.bytes, _SIZES)
    least, most = _sizes(rules.bytes)
    if not rules.cel:
        return lambda value: least <= len(cast("bytes", value)) <= most
    expressions = [_expression(_BYTES_EXPRESSIONS, rule.expression) for rule in rules.cel]

    def test(value: object) -> bool:
        size = len(cast("bytes", value))
        return least <= size <= most and all(one(size) for one in expressions)

    return test


def _integer_test(rules: validate_pb2.UInt32Rules | validate_pb2.UInt64Rules) -> _Test:
    _known(rules, _BOUNDS)
    least = rules.gte if rules.HasField("gte") else 0
    least = rules.gt + 1 if rules.HasField("gt") else least
    most = rules.lte if rules.HasField("lte") else 2**64
    most = rules.lt - 1 if rules.HasField("lt") else most
    if least > most:
        raise _UnknownRuleError  # then a value outside the gap is meant
    return lambda value: least <= cast("int", value) <= most


def _sizes(rules: validate_pb2.StringRules | validate_pb2.BytesRules) -> tuple[int, int]:
    if rules.HasField("len"):
        return rules.len, rules.len
    return rules.min_len, rules.max_len if rules.HasField("max_len") else 2**63


def _expression(known: dict[str, Callable[..., bool]], text: str) -> Callable[..., bool]:
    try:
        return known[text]
    except KeyError:
        raise _UnknownRuleError from None


def _known(rules: Message, names: set[str] | frozenset[str]) -> None:
    """Refuse rules beside those that are known.

    Raises:
        _UnknownRuleError: there are some.
    """
    if any(field.name not in names for field, _ in rules.ListFields()):
        raise _UnknownRuleError


def _some_of(group: str) -> Holds:
    return lambda message: message.WhichOneof(group) is not None


def _presence_of(name: str) -> Holds:
    return lambda message: message.HasField(name)


def _always(_message: Message) -> bool:
    return True


def _all_of(checks: Sequence[Holds]) -> Holds:
    if not checks:
        return _always

    def holds(message: Message) -> bool:
        for check in checks:  # noqa: SIM110 - a generator would cost as much as the checks
            if not check(message):
                return False
        return True

    return holds
