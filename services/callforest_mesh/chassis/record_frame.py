"""The frame around every stored value: a checksum that also covers where the value belongs.

LMDB 0.9 has no checksums of its own and serves damaged pages without a word. Because the frame
covers database and key (which begins with the tenant), a value under another's key fails as well.
"""

from __future__ import annotations

import hashlib
from typing import Final

CHECKSUM_BYTES: Final = 16
_DOMAIN: Final = b"callforest-record-v1"


def checksum(database: str, key: bytes, payload: bytes | memoryview) -> bytes:
    """Give the 16 bytes that stand before a payload: SHA-256, truncated."""
    name = database.encode()
    digest = hashlib.sha256(
        b"%b%b%b%b%b"
        % (_DOMAIN, len(name).to_bytes(2, "big"), name, len(key).to_bytes(2, "big"), key)
    )
    digest.update(payload)
    return digest.digest()[:CHECKSUM_BYTES]


def seal(database: str, key: bytes, payload: bytes) -> bytes:
    """Give what is stored for a payload."""
    return checksum(database, key, payload) + payload


def unseal(database: str, key: bytes, stored: memoryview) -> bytes | None:
    """Give a copy of the payload, or None when the checksum is not its own."""
    payload = stored[CHECKSUM_BYTES:]
    if len(stored) < CHECKSUM_BYTES or stored[:CHECKSUM_BYTES] != checksum(database, key, payload):
        return None
    return bytes(payload)
