"""The canonical encoding of extras (capture contract 2.5): the bytes that travel and are digested.

Extras are a map (or nothing) of null, bool, 64-bit integers, doubles, strings, lists and maps. One
value has exactly one encoding, so the digest is taken over the received bytes without parsing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from callforest_core.custody.errors import ExtrasError

ExtrasValue: TypeAlias = (
    "bool | int | float | str | list[ExtrasValue] | dict[str, ExtrasValue] | None"
)

EXTRAS_DIGEST_VERSION: Final = 1
MAX_DEPTH: Final = 256
"""Lists and maps inside each other. Deeper values are refused before they exhaust a stack."""

EMPTY_EXTRAS: Final = b"N"
_DOMAIN: Final = b"nemo-gym-staging-extras-v1" + bytes([EXTRAS_DIGEST_VERSION])
_KNOWN_BYTES: Final = 1024
"""Longer extras than these are rare, and their digests are not kept."""
_CONTAINERS: Final = frozenset({list, dict})
_U64: Final = struct.Struct(">Q")
_I64: Final = struct.Struct(">q")
_F64: Final = struct.Struct(">d")


def extras_digest(encoded: bytes) -> bytes:
    """Digest encoded extras: 32 raw bytes."""
    return _known_digest(encoded) if len(encoded) <= _KNOWN_BYTES else _digest(encoded)


def _digest(encoded: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + encoded).digest()


_known_digest = lru_cache(maxsize=256)(_digest)  # most calls have the same extras


EMPTY_EXTRAS_DIGEST: Final = extras_digest(EMPTY_EXTRAS)


def encode_extras(value: Mapping[str, ExtrasValue] | None) -> bytes:
    """Encode extras canonically.

    Only exact types are encoded: a tuple, bytes, a numpy scalar or a subclass has no encoding, so
    that no two runtimes choose different ones. The outermost value may be any mapping.

    Raises:
        ExtrasError: the value has no encoding.

    """
    if value is None:
        return EMPTY_EXTRAS
    if not isinstance(value, Mapping):
        raise ExtrasError(f"extras are a mapping or null, not {type(value).__name__}")
    parts: list[bytes] = []
    _encode(dict(value), parts, 0)
    return b"".join(parts)


def _encode(value: object, parts: list[bytes], depth: int) -> None:
    kind = type(value)
    if kind is not list and kind is not dict:
        parts.append(_encode_scalar(value))
        return
    if depth == MAX_DEPTH:
        raise ExtrasError(f"deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        parts.append(b"L" + _U64.pack(len(value)))
        for element in value:
            _encode(element, parts, depth + 1)
    elif isinstance(value, dict):
        _encode_map(value, parts, depth)


def _encode_map(value: dict[object, object], parts: list[bytes], depth: int) -> None:
    parts.append(b"D" + _U64.pack(len(value)))
    keyed = [(_text(key), key) for key in value]
    keyed.sort()
    for encoded_key, key in keyed:
        parts.append(_U64.pack(len(encoded_key)) + encoded_key)
        inner = value[key]
        if type(inner) in _CONTAINERS:
            _encode(inner, parts, depth + 1)
        else:
            parts.append(_encode_scalar(inner))


def _encode_scalar(value: object) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"B\x01" if value else b"B\x00"
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise ExtrasError(f"integer outside signed 64 bits: {value}")
        return b"I" + _I64.pack(value)
    if type(value) is float:
        if not math.isfinite(value):
            raise ExtrasError(f"float is not finite: {value}")
        return b"F" + _F64.pack(value)
    if type(value) is str:
        encoded = _text(value)
        return b"S" + _U64.pack(len(encoded)) + encoded
    raise ExtrasError(f"no encoding for {type(value).__name__}")


def _text(value: object) -> bytes:
    if type(value) is not str:
        raise ExtrasError(f"keys are text, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ExtrasError(f"text is not valid Unicode: {error.reason}") from error


def decode_extras(encoded: bytes) -> dict[str, ExtrasValue] | None:
    """Decode canonical bytes, refusing every other encoding of the same value.

    Raises:
        ExtrasError: the bytes are truncated, have a surplus, are deeper than `MAX_DEPTH`, or are
            not what `encode_extras` writes (key order, repeated key, bool byte, non-finite float).

    """
    reader = _Reader(encoded)
    value = reader.value(0)
    if reader.offset != len(encoded):
        raise ExtrasError(f"{len(encoded) - reader.offset} bytes after the value")
    if value is None or isinstance(value, dict):
        return value
    raise ExtrasError(f"extras are a map or null, not {type(value).__name__}")


class _Reader:
    """A cursor over encoded extras."""

    __slots__ = ("_bytes", "offset")

    def __init__(self, encoded: bytes) -> None:
        self._bytes = encoded
        self.offset = 0

    def value(self, depth: int) -> ExtrasValue:
        tag = self._take(1)
        if tag in (b"L", b"D"):
            if depth == MAX_DEPTH:
                raise ExtrasError(f"deeper than {MAX_DEPTH}")
            return self._list(depth) if tag == b"L" else self._map(depth)
        return self._scalar(tag)

    def _scalar(self, tag: bytes) -> ExtrasValue:
        if tag == b"N":
            return None
        if tag == b"B":
            byte = self._take(1)
            if byte not in (b"\x00", b"\x01"):
                raise ExtrasError(f"bool byte is {byte.hex()}")
            return byte == b"\x01"
        if tag == b"I":
            integer: int = _I64.unpack(self._take(8))[0]
            return integer
        if tag == b"F":
            number: float = _F64.unpack(self._take(8))[0]
            if not math.isfinite(number):
                raise ExtrasError(f"float is not finite: {number}")
            return number
        if tag == b"S":
            return self._text()[1]
        raise ExtrasError(f"unknown tag {tag.hex()} at byte {self.offset - 1}")

    def _list(self, depth: int) -> list[ExtrasValue]:
        return [self.value(depth + 1) for _ in range(self._count())]

    def _map(self, depth: int) -> dict[str, ExtrasValue]:
        result: dict[str, ExtrasValue] = {}
        previous: bytes | None = None
        for _ in range(self._count()):
            key_bytes, key = self._text()
            if previous is not None and key_bytes <= previous:
                raise ExtrasError(f"key {key!r} is out of order or repeated")
            previous = key_bytes
            result[key] = self.value(depth + 1)
        return result

    def _count(self) -> int:
        """Read an element count. Every element has at least one byte, so it cannot exceed them."""
        count: int = _U64.unpack(self._take(8))[0]
        if count > len(self._bytes) - self.offset:
            raise ExtrasError(f"count {count} exceeds the bytes that follow")
        return count

    def _text(self) -> tuple[bytes, str]:
        raw = self._take(_U64.unpack(self._take(8))[0])
        try:
            return raw, raw.decode()
        except UnicodeDecodeError as error:
            raise ExtrasError(f"text is not UTF-8: {error.reason}") from error

    def _take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self._bytes):
            raise ExtrasError(f"truncated at byte {self.offset}")
        taken = self._bytes[self.offset : end]
        self.offset = end
        return taken
