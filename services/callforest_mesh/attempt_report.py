"""An attempt for a person to read: what committed, who continued whom, what failed and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from callforest.capture.v1 import attempt_pb2, call_record_pb2, receipt_pb2
from callforest_client.ledger import Manifest

_SHOWN_CALLS = 2000


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A call in its tree.

    Attributes:
        record: the call.
        branch: the drawing in front of it.
    """

    record: call_record_pb2.CallRecord
    branch: str


def report(manifest: Manifest, receipt: receipt_pb2.Receipt | None) -> list[str]:
    """Describe an attempt and, if it was finalized, its receipt; give the lines."""
    attempt = manifest.attempt
    state = attempt_pb2.AttemptState.Name(attempt.state).removeprefix("ATTEMPT_STATE_").lower()
    superseded = "  superseded" if attempt.superseded else ""
    pending = len(attempt.pending_call_ids)
    counts = f"{attempt.record_count} calls committed, {attempt.failure_count} failed"
    if manifest.withdrawals:
        counts += f", {len(manifest.withdrawals)} withdrawn"
    identity = f"epoch {attempt.epoch}  revision {attempt.revision}"
    lines = [
        f"attempt {attempt.capture_key}  {state}  {identity}{superseded}",
        f"  {counts}, {pending} pending",
    ]
    if attempt.restored_from:
        lines.append(f"  restored from {attempt.restored_from}, {attempt.restored_count} calls")
    selected = selected_calls(receipt)
    shown = tree(manifest.records)[:_SHOWN_CALLS]
    lines += [f"  {_call_line(line, selected)}" for line in shown]
    if len(manifest.records) > _SHOWN_CALLS:
        lines.append(f"  ... and {len(manifest.records) - _SHOWN_CALLS} more calls")
    lines += [f"  pending {call_id}" for call_id in attempt.pending_call_ids]
    lines += [f"  failed {_failure_line(failure)}" for failure in manifest.failures]
    lines += [f"  withdrawn {_withdrawal_line(one)}" for one in manifest.withdrawals]
    if receipt is not None and receipt.capture_key == attempt.capture_key:
        lines += _receipt_lines(receipt)
    return lines


def tree(records: Sequence[call_record_pb2.CallRecord]) -> list[TreeLine]:
    """Order calls as trees, roots and children in commit order, each with its drawing."""
    return list(_walk(children_of(records)))


def children_of(
    records: Sequence[call_record_pb2.CallRecord],
) -> Mapping[str, list[call_record_pb2.CallRecord]]:
    """Group calls by their parent; roots, and calls whose parent is not there, are under ""."""
    known = {record.coords.call_id for record in records}
    children: dict[str, list[call_record_pb2.CallRecord]] = {"": []}
    for record in records:
        parent = record.coords.parent_call_id
        children.setdefault(parent if parent in known else "", []).append(record)
    return children


def selected_calls(receipt: receipt_pb2.Receipt | None) -> frozenset[str]:
    """Give the calls that train, as far as the receipt says."""
    if receipt is None or receipt.masked:
        return frozenset()
    return frozenset(call.call_id for call in receipt.calls if call.selected)


def _walk(children: Mapping[str, list[call_record_pb2.CallRecord]]) -> Iterator[TreeLine]:
    """Walk depth-first without recursion: a chain may have thousands of calls."""
    stack = [(record, "", True, True, False) for record in reversed(children[""])]
    while stack:
        record, indent, last, root, alone = stack.pop()
        own = "" if root else ("`- " if last else "|- ")
        yield TreeLine(record, indent + own)
        below = children.get(record.coords.call_id, [])
        only = len(below) == 1
        # In a chain each call stays in the column of the one before it.
        if not root and not (alone and only):
            indent += "   " if last else "|  "
        for index, child in reversed(list(enumerate(below))):
            stack.append((child, indent, index == len(below) - 1, False, only))


def _call_line(line: TreeLine, selected: frozenset[str]) -> str:
    coords, completion = line.record.coords, line.record.completion
    carried = coords.delta_token_count - completion.generation_token_count
    total = coords.prev_token_count + coords.delta_token_count
    return (
        f"{line.branch}{coords.call_id}  {coords.prev_token_count}+{carried}"
        f"+{completion.generation_token_count}={total} tokens  "
        f"weights {coords.weight_version}  {completion.finish_reason or 'unknown'}"
        f"{_source(line.record)}{'  trains' if coords.call_id in selected else ''}"
    )


def _source(record: call_record_pb2.CallRecord) -> str:
    owner = record.source_capture_key
    return f"  restored from {owner}" if owner else ""


def _failure_line(failure: attempt_pb2.CallFailure) -> str:
    cause = f" ({failure.worker_reason})" if failure.worker_reason else ""
    detail = f": {failure.detail}" if failure.detail else ""
    return f"{failure.call_id}  {failure.reason}{cause}{detail}"


def _withdrawal_line(withdrawal: attempt_pb2.CallWithdrawal) -> str:
    detail = f": {withdrawal.detail}" if withdrawal.detail else ""
    return f"{withdrawal.call_id}  {withdrawal.reason}{detail}"


def _receipt_lines(receipt: receipt_pb2.Receipt) -> list[str]:
    verdict = f"masked: {receipt.mask_reason}" if receipt.masked else "trains"
    if receipt.salvaged_from:
        verdict += f", salvaged from {receipt.salvaged_from}"
    if receipt.mask_detail:
        verdict += f" ({receipt.mask_detail})"
    lines = [
        f"receipt  group {receipt.group_id} slot {receipt.slot}  reward {receipt.reward:g}",
        f"  {verdict}",
    ]
    if receipt.mask_cause:
        kind = "fault" if receipt.mask_reason == "selection_refused" else "first failure"
        lines.append(f"  {kind}: {receipt.mask_cause}")
    if receipt.HasField("terminal_call_id"):
        lines.append(f"  scored call {receipt.terminal_call_id} ({receipt.terminal_selection})")
    elif receipt.terminal_trail:
        lines.append(f"  no call attributed: {receipt.terminal_trail}")
    if not receipt.masked:
        lines.append(
            f"  {receipt.generated_token_count} tokens with loss of "
            f"{receipt.total_token_count}{', truncated' if receipt.truncated else ''}"
        )
    lines.append(f"  digest {receipt.digest.hex()}")
    return lines
