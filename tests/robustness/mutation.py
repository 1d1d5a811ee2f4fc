"""What goes wrong with a message: in its fields, in its bytes, in JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Final, TypeAlias, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.robustness.fuzz_seeds import Seeds

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from a body down to a value."""
Container: TypeAlias = dict[str, object] | list[object]

_TEXTS: Final = (
    "",
    "\0",
    "a\0b",
    "x" * 129,
    "x" * 5000,
    "../../etc",
    "a/b",
    "r-a7",
    "caf\u00e9",
    "\U0001f600",
    "\u202e",
    "name\n",
    " ",
    "%s%n",
    "None",
)
_INTEGERS: Final = (
    *(0, 1, -1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**31), -(2**63), 16_385, 3_600_001),
)
_NUMBERS: Final = (float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 5e-324, -1.0)
_RANGES: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_UNKNOWN_FIELDS: Final = (
    b"\xfa\xff\x01\x03abc",  # bytes
    b"\xf8\xff\x01\x96\x01",  # a varint
    b"\xfd\xff\x01\0\0\0\0",  # a fixed32
)
LARGE: Final = 3 << 20


def unknown_field(size: int) -> bytes:
    """Make a serialized field of so many bytes that no schema has."""
    varint, left = bytearray(), size
    while left >= 0x80:
        varint.append(left & 0x7F | 0x80)
        left >>= 7
    return b"\xfa\xff\x01" + bytes(varint) + bytes([left]) + bytes(size)


class MessageMutation:
    """Breaks messages, one to three faults each.

    Args:
        chance: decides.
        seeds: makes what is put in place of parts.
    """

    def __init__(self, chance: random.Random, seeds: Seeds) -> None:
        self._chance = chance
        self._seeds = seeds

    def fields(self, message: Message) -> None:
        """Break fields of a message in place."""
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            places = [place for place in places_in(message) if place[1] is not None]
            if places:
                self._break(*self._chance.choice(places))

    def serialized(self, content: bytes) -> bytes:
        """Break a serialized message."""
        chance = self._chance
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.randint(1, 12))
        match chance.randrange(8):
            case 0:
                return content[:at]
            case 1:
                return content[:at] + chance.randbytes(chance.randint(1, 12)) + content[at:]
            case 2:
                return content[:at] + content[end:]
            case 3:
                return content + content[at:end] + content
            case 4:
                return chance.randbytes(chance.randint(1, 200))
            case 5:
                return content[:at] + b"\xff" * chance.randint(1, 11) + content[end:]
            case 6:
                return content[:at] + bytes([chance.randrange(256)]) * (end - at) + content[end:]
        flipped = bytearray(content or b"\0")
        for _ in range(chance.randint(1, 4)):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        return bytes(flipped)

    def _break(self, message: Message, field: FieldDescriptor) -> None:
        chance = self._chance
        if chance.random() < 0.05:
            message.MergeFromString(chance.choice(_UNKNOWN_FIELDS))
        elif field.is_repeated:
            self._break_repeated(message, field)
        elif field.message_type is not None:
            match chance.randrange(3):
                case 0:
                    message.ClearField(field.name)
                case 1:
                    message.ClearField(field.name)
                    getattr(message, field.name).SetInParent()
                case _:
                    getattr(message, field.name).CopyFrom(self._seeds.draft(field.message_type))
        else:
            setattr(message, field.name, self._wrong(message, field))

    def _break_repeated(self, message: Message, field: FieldDescriptor) -> None:
        held = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        match self._chance.randrange(3):
            case 0:
                message.ClearField(field.name)
            case 1:
                for _ in range(self._chance.choice((1, 1, 300))):
                    if field.message_type is None:
                        held.append(held[0] if held else self._seeds.scalar(field))
                    else:
                        held.add().CopyFrom(held[0])
            case _:
                self._seeds.fill(message, field)

    def _wrong(self, message: Message, field: FieldDescriptor) -> str | bytes | int | float | bool:
        chance = self._chance
        match field.type:
            case FieldDescriptor.TYPE_STRING:
                if chance.random() < 0.3:
                    return str(self._seeds.scalar(field))
                return chance.choice(_TEXTS)
            case FieldDescriptor.TYPE_BYTES:
                return self._wrong_bytes(message, field)
            case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
                return chance.choice(_NUMBERS)
            case FieldDescriptor.TYPE_BOOL:
                return not getattr(message, field.name)
        low, high = _RANGES[field.type]
        now = getattr(message, field.name)
        choices = [*_INTEGERS, now + 1, now - 1, now * 2]
        return chance.choice([one for one in choices if low <= one <= high])

    def _wrong_bytes(self, message: Message, field: FieldDescriptor) -> bytes:
        chance = self._chance
        held: bytes = getattr(message, field.name)
        others = [
            getattr(message, one.name)
            for one in message.DESCRIPTOR.fields
            if one.type == FieldDescriptor.TYPE_BYTES and one.name != field.name
        ]
        match chance.randrange(7):
            case 0:
                return b""
            case 1:
                return held[:-1]
            case 2:
                return held + b"\0"
            case 3 if others:
                return chance.choice(others)  # a digest where another belongs
            case 4:
                return bytes(len(held))
            case 5 if chance.random() < 0.02:
                return bytes(LARGE)
        return self.serialized(held)


def places_in(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Give every field of a message and of what it holds; absent parts are named, not entered."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for one in getattr(message, field.name):
                yield from places_in(one)
        elif message.HasField(field.name):
            yield from places_in(getattr(message, field.name))


WRONG_VALUES: Final[tuple[object, ...]] = (
    *(None, True, 0, -1, 2**63, 10**400, 1.5, 1e308, "", "x", "\0", "\ud800"),
    *([], {}, [[]], [None], {"": None}, "x" * 10_000),
)


def wrong_at_every_key(body: dict[str, object]) -> Iterator[bytes]:
    """Give the body as JSON with each value of each key, at any depth, of each wrong kind."""
    for path in _paths(body):
        for wrong in WRONG_VALUES:
            changed = copy.deepcopy(body)
            _put(changed, path, wrong)
            yield json.dumps(changed).encode("ascii")
        without = copy.deepcopy(body)
        _drop(without, path)
        yield json.dumps(without).encode("ascii")


def broken_json(body: dict[str, object], chance: random.Random) -> Iterator[bytes]:
    """Give what is no JSON, and JSON that readers take differently."""
    text = json.dumps(body).encode("ascii")
    yield from (
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"0",
        b"{",
        b"{}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf" + text,
    )
    yield text.decode().encode("utf-16")
    yield from (text + b"}", text + text, text + b"\0", b"/**/" + text, text.replace(b'"', b"'"))
    for deep in (100, 200, 5_000, 200_000):
        yield b'{"messages":' + b"[" * deep + b"]" * deep + b"}"
        yield b'{"messages":' + b'{"a":' * deep + b"1" + b"}" * deep + b"}"
        yield b"[" * deep
    yield text[:-1] + b',"model":"a","model":"b"}'
    for number in (b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 5_000, b"0x1", b"1.", b"01"):
        yield text[:-1] + b',"seed":' + number + b"}"
        yield text[:-1] + b',"unheard_of":' + number + b"}"
    for _ in range(60):
        at = chance.randrange(len(text))
        yield text[:at]
        yield text[:at] + chance.randbytes(chance.randint(1, 3)) + text[at + 1 :]


def _paths(value: object, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _paths(one, (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _paths(one, (*path, index))


def _holder(body: dict[str, object], path: Path) -> Container:
    holder: Container = body
    for key in path[:-1]:
        holder = cast("Container", cast("dict[str | int, object]", holder)[key])
    return holder


def _put(body: dict[str, object], path: Path, value: object) -> None:
    cast("dict[str | int, object]", _holder(body, path))[path[-1]] = value


def _drop(body: dict[str, object], path: Path) -> None:
    del cast("dict[str | int, object]", _holder(body, path))[path[-1]]
