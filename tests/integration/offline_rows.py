"""Verifies a published group from its bytes alone, with hashlib and struct: no mesh, no core."""

import hashlib
import struct

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, receipt_pb2, staged_call_pb2


def words(call: staged_call_pb2.StagedCall) -> list[int]:
    column = call.canonical.token_ids
    return list(struct.unpack(f"<{len(column) // 4}I", column))


def long_words(tokens: list[int]) -> bytes:
    return struct.pack(f">Q{len(tokens)}Q", len(tokens), *tokens)


def sized(content: bytes) -> bytes:
    return struct.pack(">Q", len(content)) + content


def floats(values: list[float]) -> bytes:
    return struct.pack(f">Q{len(values)}f", len(values), *values)


def call_digest(call: staged_call_pb2.StagedCall) -> bytes:
    """docs/protocol.md, section 6, "call digest"."""
    tokens = words(call)
    logprobs = struct.unpack(f"<{len(call.canonical.logprobs) // 4}f", call.canonical.logprobs)
    carry = call.canonical.carry_token_count
    root = not call.HasField("parent_call_id")
    parent = b"\x00" if root else b"\x01" + sized(call.parent_call_id.encode())
    return hashlib.sha256(
        b"nemo-gym-staging-call-v2"
        + bytes([2, 2, 1])
        + sized(call.capture_key.encode())
        + sized(call.call_id.encode())
        + parent
        + sized(b"text" if root else b"token_in")
        + struct.pack(
            ">4Q",
            call.prev_token_count,
            len(tokens),
            call.prev_token_count + len(tokens),
            call.weight_version,
        )
        + sized(long_words(tokens))
        + sized(floats([0.0] * carry + [1.0] * len(logprobs)))
        + sized(floats([0.0] * carry + list(logprobs)))
        + hashlib.sha256(b"nemo-gym-staging-extras-v1" + bytes([1]) + call.extras).digest()
        + b"\x01"
        + call.chain_hash
        + b"\x01"
        + call.cumulative_hash
    ).digest()


def receipt_digest(receipt: receipt_pb2.Receipt) -> bytes:
    """docs/protocol.md, section 8, "Receipts"."""
    terminal = b"\x00"
    if receipt.HasField("terminal_call_id"):
        terminal = b"\x01" + sized(receipt.terminal_call_id.encode())
    forest = receipt.mode == attempt_pb2.CAPTURE_MODE_FOREST
    number = (3 if receipt.salvaged_from else 2) if forest else 1
    restored = any(call.source_capture_key for call in receipt.calls)
    domain = b"callforest-receipt-v4" + bytes([number])
    layout = (
        (domain if restored else b"callforest-receipt-v%d" % number)
        + sized(receipt.group_id.encode())
        + sized(receipt.rollout_id.encode())
        + struct.pack(">Q", receipt.slot)
        + sized(receipt.capture_key.encode())
        + struct.pack(">QQd", receipt.epoch, receipt.revision, receipt.reward)
        + bytes([receipt.masked])
        + sized(receipt.mask_reason.encode())
        + terminal
        + sized(receipt.terminal_selection.encode())
        + bytes([receipt.truncated])
    )
    if forest:
        layout += bytes([2]) + sized(receipt.selection_policy.encode())
        layout += bytes([receipt.environment_masked])
        counts = (receipt.generated_token_count, receipt.total_token_count)
        layout += struct.pack(">QQQ", *counts, receipt.longest_generation_token_count)
        layout += struct.pack(">Q", len(receipt.selected_call_ids))
        for call_id in receipt.selected_call_ids:
            layout += sized(call_id.encode())
        if receipt.salvaged_from:
            layout += sized(receipt.salvaged_from.encode())
    layout += struct.pack(">Q", len(receipt.calls))
    for call in receipt.calls:
        layout += sized(call.call_id.encode()) + call.digest + bytes([call.selected])
        if forest:
            child = call.HasField("parent_call_id")
            layout += b"\x01" + sized(call.parent_call_id.encode()) if child else b"\x00"
        if restored:
            owner = call.source_capture_key
            layout += b"\x01" + sized(owner.encode()) if owner else b"\x00"
    return hashlib.sha256(layout).digest()


def verify_offline(batch: group_batch_pb2.GroupBatch) -> None:
    """Hold every receipt, segment and row of a group against what their digests say."""
    for slot, receipt in enumerate(batch.receipts):
        assert receipt.slot == slot
        assert receipt_digest(receipt) == receipt.digest
    for call in batch.segments:
        assert call_digest(call) == call.digest
        assert call.served_response == b""
    owners = [span.segment_index for row in batch.rows for span in row.spans if span.owns_loss]
    assert sorted(owners) == list(range(len(batch.segments)))
    for row in batch.rows:
        path = [batch.segments[span.segment_index] for span in row.spans]
        if row.kind == group_batch_pb2.ROW_KIND_TRAINING:
            verify_path(path, batch.receipts[row.slot])
    for receipt in batch.receipts:
        lengths = [
            sum(len(words(batch.segments[span.segment_index])) for span in row.spans)
            for row in batch.rows
            if row.HasField("slot") and row.slot == receipt.slot and not receipt.masked
        ]
        assert receipt.masked or receipt.total_token_count == max(lengths)


def verify_path(path: list[staged_call_pb2.StagedCall], receipt: receipt_pb2.Receipt) -> None:
    """Hold a path against the receipt that it was made for."""
    selected = {call.call_id: call.digest for call in receipt.calls if call.selected}
    assert not receipt.masked
    if receipt.mode == attempt_pb2.CAPTURE_MODE_FOREST:
        assert receipt.terminal_call_id in selected
        assert set(receipt.selected_call_ids) == set(selected)
    else:
        assert receipt.terminal_call_id == path[-1].call_id
        assert [call.call_id for call in path] == list(selected)
    owners = {call.call_id: call.source_capture_key for call in receipt.calls}
    chain, tokens, parent, parent_owner = b"\x00", [], "", ""
    for call in path:
        assert selected[call.call_id] == call.digest
        owner = owners[call.call_id] or receipt.capture_key
        assert (call.capture_key, call.parent_call_id) == (owner, parent)
        assert call.parent_capture_key == ("" if parent_owner in ("", owner) else parent_owner)
        assert call.prev_token_count == len(tokens)
        delta = words(call)
        found = hashlib.sha256(b"nemo-gym-staging-chain-v1" + chain + long_words(delta)).digest()
        assert found == call.chain_hash
        chain, tokens, parent = b"\x01" + found, tokens + delta, call.call_id
        parent_owner = owner
        cumulative = hashlib.sha256(b"nemo-gym-staging-prefix-v2" + long_words(tokens)).digest()
        assert cumulative == call.cumulative_hash
    assert len(tokens) <= receipt.total_token_count
