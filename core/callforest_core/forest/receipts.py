"""The digest that fixes a receipt: what a rollout contributes and why.

It hashes a written layout (docs/protocol.md, "Receipts"), never serialized protobuf. Receipts of
chain mode have layout 1, those of forest mode layout 2; layout 3 is of a receipt whose verified
paths train although its attempt was not captured whole, so that this cannot be taken from it.
Layout 4 is of a receipt with a restored call: one of the others, with the owner of each call.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from callforest.capture.v1 import attempt_pb2, receipt_pb2

_CHAIN_DOMAIN: Final = b"callforest-receipt-v1"
_FOREST_DOMAIN: Final = b"callforest-receipt-v2"
_SALVAGED_DOMAIN: Final = b"callforest-receipt-v3"
_RESTORED_DOMAIN: Final = b"callforest-receipt-v4"
_DOMAINS: Final = {1: _CHAIN_DOMAIN, 2: _FOREST_DOMAIN, 3: _SALVAGED_DOMAIN}


def is_forest(receipt: receipt_pb2.Receipt) -> bool:
    """Say whether a receipt is of forest mode."""
    return receipt.mode == attempt_pb2.CAPTURE_MODE_FOREST


def receipt_digest(receipt: receipt_pb2.Receipt) -> bytes:
    """Give the SHA-256 of a receipt's written layout, 32 bytes."""
    forest = is_forest(receipt)
    restored = any(call.source_capture_key for call in receipt.calls)
    layout = _layout(receipt)
    hashed = hashlib.sha256(_RESTORED_DOMAIN if restored else _DOMAINS[layout])
    if restored:
        hashed.update(struct.pack(">B", layout))
    hashed.update(_text(receipt.group_id))
    hashed.update(_text(receipt.rollout_id))
    hashed.update(struct.pack(">Q", receipt.slot))
    hashed.update(_text(receipt.capture_key))
    hashed.update(
        struct.pack(">QQd?", receipt.epoch, receipt.revision, receipt.reward, receipt.masked)
    )
    hashed.update(_text(receipt.mask_reason))
    hashed.update(_optional(receipt.terminal_call_id, present=receipt.HasField("terminal_call_id")))
    hashed.update(_text(receipt.terminal_selection))
    hashed.update(struct.pack(">?", receipt.truncated))
    if forest:
        hashed.update(_forest_fields(receipt))
    hashed.update(struct.pack(">Q", len(receipt.calls)))
    for call in receipt.calls:
        hashed.update(_text(call.call_id) + call.digest + struct.pack(">?", call.selected))
        if forest:
            parent = call.parent_call_id
            hashed.update(_optional(parent, present=call.HasField("parent_call_id")))
        if restored:
            owner = call.source_capture_key
            hashed.update(_optional(owner, present=bool(owner)))
    return hashed.digest()


def _forest_fields(receipt: receipt_pb2.Receipt) -> bytes:
    """Encode what layouts 2 and 3 have between the truncation and the calls."""
    parts = [
        struct.pack(">B", receipt.mode),
        _text(receipt.selection_policy),
        struct.pack(">?", receipt.environment_masked),
        struct.pack(
            ">QQQ",
            receipt.generated_token_count,
            receipt.total_token_count,
            receipt.longest_generation_token_count,
        ),
        struct.pack(">Q", len(receipt.selected_call_ids)),
        *(_text(call_id) for call_id in receipt.selected_call_ids),
    ]
    if receipt.salvaged_from:
        parts.append(_text(receipt.salvaged_from))
    return b"".join(parts)


def _layout(receipt: receipt_pb2.Receipt) -> int:
    """Give the layout that a receipt has without a restored call."""
    if not is_forest(receipt):
        return 1
    return 3 if receipt.salvaged_from else 2


def _optional(text: str, *, present: bool) -> bytes:
    return b"\x01" + _text(text) if present else b"\x00"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">Q", len(encoded)) + encoded
