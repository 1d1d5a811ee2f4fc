"""The index entry of a staged call: where its bytes are, and where it stands in its chain.

Keys are the first 16 bytes of SHA-256 of the tenant, the same of the capture key, then the call
id: at most 160 bytes, and all calls of an attempt side by side. An entry ends with the parent's id,
and behind a NUL with the attempt under which the parent is staged when that is another.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import staged_call_pb2
from callforest_client.codec import delta_len_of, parent_of
from callforest_mesh.staging.core import CallLink

HASH_BYTES: Final = 16
_BETWEEN: Final = "\0"
_HEAD: Final = struct.Struct(">QIIQI16s")


def tenant_key(tenant: str) -> bytes:
    """Give what begins every key of a tenant."""
    return _hash(tenant)


def partition_key(tenant: str, capture_key: str) -> bytes:
    """Give what begins the key of every call of an attempt."""
    return _hash(tenant) + _hash(capture_key)


@dataclass(frozen=True, slots=True)
class CallEntry:
    """Where a call's stored bytes are.

    Attributes:
        segment: number of the segment that holds them.
        offset: their first byte in it.
        size: how many they are.
        checksum: of key and bytes (chassis/record_frame.py), 16 bytes.
        link: where the call stands in its chain.
    """

    segment: int
    offset: int
    size: int
    checksum: bytes
    link: CallLink

    def to_bytes(self) -> bytes:
        """Give what the index stores."""
        link = self.link
        head = _HEAD.pack(
            self.segment, self.offset, self.size, link.prev_len, link.delta_len, self.checksum
        )
        parent = link.parent_call_id or ""
        if link.parent_capture_key:
            parent = f"{parent}{_BETWEEN}{link.parent_capture_key}"
        return head + parent.encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> CallEntry:
        """Read what the index stores."""
        segment, offset, size, prev_len, delta_len, checksum = _HEAD.unpack_from(stored)
        parent_call_id, _, owner = stored[_HEAD.size :].decode().partition(_BETWEEN)
        link = CallLink(parent_call_id or None, prev_len, delta_len, owner)
        return cls(segment, offset, size, checksum, link)


def link_of(call: staged_call_pb2.StagedCall) -> CallLink:
    """Say where a call stands in its chain."""
    return CallLink(
        parent_of(call), call.prev_token_count, delta_len_of(call), call.parent_capture_key
    )


@functools.lru_cache(maxsize=4096)
def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:HASH_BYTES]
