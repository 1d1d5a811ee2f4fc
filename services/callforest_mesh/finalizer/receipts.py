"""Receipts: what a rollout contributes and why, and the digest that fixes it.

The digest hashes a written layout (docs/protocol.md, "Receipts"), never serialized protobuf.
"""

from __future__ import annotations

import hashlib
import struct

from callforest.capture.v1 import receipt_pb2

_DOMAIN = b"callforest-receipt-v1"


def receipt_digest(receipt: receipt_pb2.Receipt) -> bytes:
    """Give the SHA-256 of a receipt's written layout, 32 bytes."""
    hashed = hashlib.sha256(_DOMAIN)
    hashed.update(_text(receipt.group_id))
    hashed.update(_text(receipt.rollout_id))
    hashed.update(struct.pack(">Q", receipt.slot))
    hashed.update(_text(receipt.capture_key))
    hashed.update(
        struct.pack(">QQd?", receipt.epoch, receipt.revision, receipt.reward, receipt.masked)
    )
    hashed.update(_text(receipt.mask_reason))
    if receipt.HasField("terminal_call_id"):
        hashed.update(b"\x01" + _text(receipt.terminal_call_id))
    else:
        hashed.update(b"\x00")
    hashed.update(_text(receipt.terminal_selection))
    hashed.update(struct.pack(">?Q", receipt.truncated, len(receipt.calls)))
    for call in receipt.calls:
        hashed.update(_text(call.call_id) + call.digest + struct.pack(">?", call.selected))
    return hashed.digest()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">Q", len(encoded)) + encoded
