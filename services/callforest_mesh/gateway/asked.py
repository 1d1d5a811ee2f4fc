"""What a harness asks, and by what its repeats are known: a key, a mark, or nothing. Pure.

Contract: docs/protocol.md, section "Repeats: the same request is the same call".
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.refusals import malformed

KEY_HEADER: Final = "Idempotency-Key"
RETRY_HEADER: Final = "x-stainless-retry-count"
_KEY: Final = re.compile(r"[!-~]{1,255}", re.ASCII)
_COUNT: Final = re.compile(r"0*[1-9][0-9]*", re.ASCII)
_CALL_ID_DOMAIN: Final = b"callforest-call-id-v1"
_CALL_ID_DIGITS: Final = 40
_LENGTH: Final = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which call a request is.

    Attributes:
        call_id: derived from its key; "" without one.
        is_marked: whether it has no key, and its client says that it is a repeat.
    """

    call_id: str = ""
    is_marked: bool = False

    @property
    def may_repeat(self) -> bool:
        """Whether the request may be a call that was announced before."""
        return bool(self.call_id) or self.is_marked


NEW: Final = Identity()
"""That of a request which is a call of its own, whatever it says."""
MARKED: Final = Identity(is_marked=True)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request for a completion, unread.

    Attributes:
        capture_key: the attempt.
        body: as received.
        dialect: its API.
        claim: the call that it says it continues.
        identity: which call it is.
    """

    capture_key: str
    body: bytes
    dialect: Dialect
    claim: Claim | None = None
    identity: Identity = NEW

    @property
    def body_digest(self) -> bytes:
        """Tells it from another request, 32 bytes; digests what was received each time."""
        return digest_body(self.body, self.dialect, self.claim)


def identify(capture_key: str, keys: Sequence[str], retry_count: str = "") -> Identity:
    """Say which call a request is.

    Args:
        capture_key: its attempt.
        keys: the idempotency keys that it carries; there may be one.
        retry_count: how often its client sent it before, as the client writes it; what is no number
            above 0 marks nothing.

    Raises:
        HttpRefusal: a key is none, or there are several.
    """
    if not keys:
        is_marked = bool(retry_count) and _COUNT.fullmatch(retry_count) is not None
        return MARKED if is_marked else NEW
    if len(keys) > 1 or _KEY.fullmatch(keys[0]) is None:
        raise malformed(f"`{KEY_HEADER}` must be 1 to 255 visible ASCII characters.", KEY_HEADER)
    return Identity(call_id_of(capture_key, keys[0]))


def call_id_of(capture_key: str, key: str) -> str:
    """Name the call of an idempotency key; nothing but the key decides."""
    named = _CALL_ID_DOMAIN + _prefixed(capture_key.encode()) + _prefixed(key.encode())
    return "k" + hashlib.sha256(named).hexdigest()[:_CALL_ID_DIGITS]


def digest_body(body: bytes, dialect: Dialect, claim: Claim | None = None) -> bytes:
    """Digest a request: its API, its claim, and what was received."""
    digest = begin_digest(dialect, claim)
    digest.update(body)
    return digest.digest()


def begin_digest(dialect: Dialect, claim: Claim | None = None) -> hashlib._Hash:
    """Digest all of a request that stands before its body."""
    claimed = b"" if claim is None else claim.call_id.encode()
    is_whole = claim is not None and claim.history_is_whole
    digest = hashlib.sha256()
    for part in (dialect.value.encode(), claimed, bytes([is_whole])):
        digest.update(_prefixed(part))
    return digest


def _prefixed(part: bytes) -> bytes:
    return _LENGTH.pack(len(part)) + part
