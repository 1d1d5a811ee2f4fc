"""Valid messages of any type, made from its descriptor, the rules of its schema, and known facts.

A mutation of nonsense only ever reaches the parser. So seeds are right: their fields keep the
rules, and where a field's name says what belongs there, it is something that the mesh knows. Names
come from short lists, which bounds what a run of any length can store.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import protovalidate
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from buf.validate import validate_pb2
from callforest.capture.v1 import capture_admission_pb2, commit_coords_pb2, staged_call_pb2

_ALPHABET: Final = "ABCXYZabcxyz0189._-"
_TRIES: Final = 60
_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_EMPTY_OR: Final = re.compile(r"size\(this\) == 0 \|\| size\(this\) == (\d+)")
"""How a schema says that a digest may be left out."""
_VALIDATOR: Final = protovalidate.Validator()

Fact = str | int | bytes | float
Facts = Mapping[str, Sequence[Fact]]
"""Name of a field -> values that the mesh knows."""
Whole = Mapping[str, Sequence[Message]]
"""Full name of a message -> messages that fit together as a whole."""


class NoSeedError(Exception):
    """No valid message of a type could be made: it needs a repair or whole seeds."""


def _repair_probe(probe: capture_admission_pb2.ChainProbe, chance: random.Random) -> None:
    probe.item_count %= 5
    probe.context_digests = chance.randbytes(32 * (probe.item_count + 1))
    probe.assistant_fingerprint = chance.choice([b"", chance.randbytes(32)])


def _repair_parent(
    message: staged_call_pb2.StagedCall | commit_coords_pb2.CommitCoords, chance: random.Random
) -> None:
    if not message.HasField("parent_call_id"):
        message.prev_token_count = 0
    elif message.prev_token_count == 0:
        message.prev_token_count = chance.randint(1, 64)


def _repair_columns(columns: staged_call_pb2.CanonicalColumns, chance: random.Random) -> None:
    carried, generated = chance.randint(0, 4), chance.randint(1, 4)
    columns.carry_token_count = carried
    columns.token_ids = chance.randbytes(4 * (carried + generated))
    columns.logprobs = b"\0\0\0\xbf" * generated


REPAIRS: Final[Mapping[str, Callable[..., None]]] = {
    "callforest.capture.v1.ChainProbe": _repair_probe,
    "callforest.capture.v1.StagedCall": _repair_parent,
    "callforest.capture.v1.CommitCoords": _repair_parent,
    "callforest.capture.v1.CanonicalColumns": _repair_columns,
    "callforest.capture.v1.CallFingerprints": lambda fingerprints, _chance: (
        fingerprints.ClearField("output"),
        fingerprints.ClearField("continuation"),
    ),
}
"""What a rule across fields asks for, by the message's full name."""


class Seeds:
    """Makes valid messages.

    Args:
        chance: decides.
        facts: values by field name.
        whole: messages that are taken as they are.
    """

    def __init__(self, chance: random.Random, facts: Facts, whole: Whole) -> None:
        self._chance = chance
        self._facts = facts
        self._whole = whole

    def message(self, kind: Descriptor) -> Message:
        """Make a message that keeps the rules of its schema.

        Raises:
            NoSeedError: none could be made.
        """
        violations: list[protovalidate.Violation] = []
        for _ in range(_TRIES):
            made = self.draft(kind)
            violations = _VALIDATOR.collect_violations(made)
            if not violations:
                return made
        raise NoSeedError(f"{kind.full_name}: {violations[0].proto}")

    def draft(self, kind: Descriptor) -> Message:
        """Make a message that keeps the rules of each of its fields."""
        known = self._whole.get(kind.full_name)
        if known and self._chance.random() < 0.7:
            made: Message = GetMessageClass(kind)()
            made.CopyFrom(self._chance.choice(known))
            return made
        made = GetMessageClass(kind)()
        for oneof in kind.oneofs:
            field = self._chance.choice(oneof.fields)
            if len(oneof.fields) > 1 or not field.has_presence or self._present(field):
                self.fill(made, field)
        for field in kind.fields:
            if field.containing_oneof is None and self._present(field):
                self.fill(made, field)
        if repair := REPAIRS.get(kind.full_name):
            repair(made, self._chance)
        return made

    def fill(self, message: Message, field: FieldDescriptor) -> None:
        """Give a field a value that keeps its rules."""
        rules = rules_of(field)
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                return
            least = rules.repeated.min_items
            for _ in range(max(least, self._chance.randint(0, 3))):
                if field.message_type is not None:
                    getattr(message, field.name).add().CopyFrom(self.draft(field.message_type))
                else:
                    getattr(message, field.name).append(self.scalar(field))
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            part.CopyFrom(self._time() if _is_time(field) else self.draft(field.message_type))
        else:
            setattr(message, field.name, self.scalar(field))

    def scalar(self, field: FieldDescriptor) -> Fact:
        """Give a value of a field that is no message."""
        is_enum = field.type == FieldDescriptor.TYPE_ENUM
        known = None if is_enum else self._facts.get(field.name)
        if known and self._chance.random() < 0.9:
            return self._chance.choice(known)
        rules = rules_of(field)
        match field.type:
            case FieldDescriptor.TYPE_STRING:
                return self._text(rules.string)
            case FieldDescriptor.TYPE_BYTES if (size := _size_unless_empty(rules)) is not None:
                return self._chance.randbytes(self._chance.choice([0, size]))
            case FieldDescriptor.TYPE_BYTES:
                least = rules.bytes.len or rules.bytes.min_len
                most = rules.bytes.len or min(rules.bytes.max_len or 64, least + 64)
                return self._chance.randbytes(self._chance.randint(least, most))
            case FieldDescriptor.TYPE_ENUM:
                return self._chance.choice([one.number for one in field.enum_type.values[1:]])
            case FieldDescriptor.TYPE_BOOL:
                return self._chance.random() < 0.5
            case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
                return self._chance.choice([0.25, 0.5, self._chance.random()])
        return self._integer(field, rules)

    def _present(self, field: FieldDescriptor) -> bool:
        return rules_of(field).required or not field.has_presence or self._chance.random() < 0.7

    def _text(self, rules: validate_pb2.StringRules) -> str:
        if rules.uuid:
            return str(uuid.UUID(int=self._chance.randint(1, 6)))
        least = max(rules.min_len, 1)
        size = self._chance.randint(least, max(least, min(rules.max_len or 12, 12)))
        return "".join(self._chance.choices(_ALPHABET, k=size))

    def _integer(self, field: FieldDescriptor, rules: validate_pb2.FieldRules) -> int:
        low, high = _INTEGERS[field.type]
        kind = rules.WhichOneof("type")
        if kind is not None:
            bounds = getattr(rules, kind)
            low = bounds.gte if bounds.HasField("gte") else low
            low = bounds.gt + 1 if bounds.HasField("gt") else low
            high = bounds.lte if bounds.HasField("lte") else high
            high = bounds.lt - 1 if bounds.HasField("lt") else high
        near = [low, high, 0, 1, 2, 3, 7, 100]
        return self._chance.choice([one for one in near if low <= one <= high])

    def _time(self) -> Message:
        from google.protobuf.timestamp_pb2 import Timestamp

        return Timestamp(seconds=1_700_000_000 + self._chance.randint(0, 100))


def rules_of(field: FieldDescriptor) -> validate_pb2.FieldRules:
    """Give the rules of a field."""
    rules: validate_pb2.FieldRules = field.GetOptions().Extensions[validate_pb2.field]
    return rules


def _size_unless_empty(rules: validate_pb2.FieldRules) -> int | None:
    """Give the only size that bytes may have, if they may be left out besides."""
    for rule in rules.cel:
        if (found := _EMPTY_OR.search(rule.expression)) is not None:
            return int(found[1])
    return None


def _is_time(field: FieldDescriptor) -> bool:
    return field.message_type.full_name == "google.protobuf.Timestamp"
