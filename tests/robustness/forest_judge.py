"""What a chaos run of forest mode must not find: parents, selections and rows, call by call.

Everything is held against what the harnesses themselves asked, got and accepted
(`forest_account.py`), by the rules of docs/protocol.md, sections 7b and 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from callforest.capture.v1 import (
    call_record_pb2,
    group_batch_pb2,
    receipt_pb2,
    staged_call_pb2,
)
from callforest_client.ledger import Manifest
from callforest_mesh.worker.chat_text import TURN_BEGIN
from tests.integration.offline_rows import verify_offline, words
from tests.robustness.forest_account import Account, AskedCall, Chosen
from tests.robustness.history import Faults

WITHOUT_COORDINATES: Final = "request_finished_without_staged_coordinates"
TRAINING: Final = group_batch_pb2.ROW_KIND_TRAINING
PLACEHOLDER: Final = group_batch_pb2.ROW_KIND_PLACEHOLDER
_Records = Mapping[str, call_record_pb2.CallRecord]
_Line = list[tuple[str, bool]]


def records_of(manifest: Manifest | None) -> dict[str, call_record_pb2.CallRecord]:
    """Give an attempt's records by call."""
    return {} if manifest is None else {one.coords.call_id: one for one in manifest.records}


def check_forest_parents(
    accounts: Mapping[str, Account], manifests: Mapping[str, Manifest]
) -> list[str]:
    """Hold each record's parent against what its harness had asked (P3).

    The call continues the one whose answer ends all that was asked up to the last answer. When no
    recorded call ends so, it is a root, whatever else of its history is known. When several do,
    since the same was said again, it continues the one that the harness named.
    """
    wrong = []
    for capture_key, account in accounts.items():
        records = records_of(manifests.get(capture_key))
        ending: dict[bytes, list[str]] = {}
        for one in account.asked:
            record = records.get(one.call_id)
            if record is None:
                continue
            before = ending.get(one.history, []) if one.history else []
            before = [one.meant] if one.meant in before else before
            if record.coords.parent_call_id not in (before or [""]):
                named = record.coords.parent_call_id or "nothing"
                wanted = " or ".join(before) or "nothing"
                wrong.append(f"{capture_key}/{one.call_id} continues {named}, not {wanted}")
            if one.said is not None and record.HasField("replay"):
                ending.setdefault(one.ends, []).append(one.call_id)
    return wrong


def check_requests(accounts: Mapping[str, Account], manifests: Mapping[str, Manifest]) -> Faults:
    """Each record and each failure is that of one request, and each answer was captured.

    Only a request that its harness gave up may have failed, or be pending.
    """
    faults = Faults()
    for capture_key, account in accounts.items():
        manifest = manifests.get(capture_key)
        records = records_of(manifest)
        asked = {one.call_id: one for one in account.asked}
        for call_id in records.keys() - asked.keys():
            faults.duplicated.append(f"{capture_key}/{call_id}: nobody asked for it")
        given_up = {one.call_id for one in account.asked if one.given_up}
        for call_id, why in _uncaptured(manifest):
            if call_id not in records.keys() | given_up:
                faults.lost.append(f"the capture of {capture_key}/{call_id}: {why}")
        for one in account.asked:
            _check_request(f"{capture_key}/{one.call_id}", one, records.get(one.call_id), faults)
    return faults


def _uncaptured(manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """Give the calls that failed or are pending, and why."""
    if manifest is None:
        return
    for failure in manifest.failures:
        yield failure.call_id, f"{failure.reason} {failure.detail}"
    for call_id in manifest.attempt.pending_call_ids:
        yield call_id, "pending"


def _check_request(
    name: str, asked: AskedCall, record: call_record_pb2.CallRecord | None, faults: Faults
) -> None:
    if asked.said is not None and asked.said.call_id != asked.call_id:
        faults.changed.append(f"the name of {name}: {asked.said.call_id}")
    if record is None:
        return
    if not record.HasField("replay") and not asked.is_delta:
        # A delta that is answered when its history is lost names none, and nothing continues it.
        faults.lost.append(f"the history of {name}")
    taken = "continuation" if record.coords.HasField("parent_call_id") else "root"
    if asked.said is not None and asked.said.context not in ("", taken):
        faults.changed.append(f"what {name} was told of its context: {asked.said.context}")


def mask_of(manifest: Manifest) -> str:
    """Give the reason for which an attempt must not train; "" when there is none."""
    if manifest.attempt.pending_call_ids:
        return "pending_call"
    recorded = records_of(manifest)
    for failure in manifest.failures:
        if failure.reason != WITHOUT_COORDINATES or failure.call_id not in recorded:
            return "capture_poisoned"
    return ""


def check_selections(
    chosen: Mapping[str, Chosen],
    receipts: Mapping[str, receipt_pb2.Receipt],
    manifests: Mapping[str, Manifest],
) -> Faults:
    """What a receipt selects is what its evidence says, and it is masked for a reason alone.

    Args:
        chosen: by rollout, what it was finished with.
        receipts: by rollout.
        manifests: by attempt.
    """
    faults = Faults()
    for rollout_id, one in chosen.items():
        receipt, manifest = receipts.get(rollout_id), manifests.get(one.capture_key)
        if receipt is None or manifest is None:
            faults.lost.append(f"the selection of {rollout_id}")
            continue
        records = records_of(manifest)
        mask = mask_of(manifest) or _mask_of_choice(one, records)
        if receipt.mask_reason != mask or receipt.masked != bool(mask):
            why = receipt.mask_reason or "nothing"
            faults.changed.append(f"{rollout_id} is masked for {why}, not {mask or 'nothing'}")
        elif fault := _selection_fault(one, receipt, records):
            faults.changed.append(f"the selection of {rollout_id}: {fault}")
    return faults


def _mask_of_choice(chosen: Chosen, records: _Records) -> str:
    """Give the reason for which a choice must not train; "" when there is none."""
    call_ids = list(records) if chosen.call_ids is None else chosen.call_ids
    parents = {records[one].coords.parent_call_id for one in call_ids if one in records} - {""}
    return "selection_not_closed" if parents - set(call_ids) else ""


def _selection_fault(chosen: Chosen, receipt: receipt_pb2.Receipt, records: _Records) -> str:
    """Say what is wrong with the selection of a receipt; "" for nothing."""
    trains = [call.call_id for call in receipt.calls if call.selected]
    parents = {call.call_id: call.parent_call_id for call in receipt.calls}
    if parents != {name: record.coords.parent_call_id for name, record in records.items()}:
        return "its parents are not the ledger's"
    if receipt.masked:
        return f"masked, and {trains} are selected" if trains else ""
    selected = list(receipt.selected_call_ids)
    wanted = list(records) if chosen.call_ids is None else list(chosen.call_ids)
    if receipt.selection_policy != chosen.policy:
        return f"{receipt.selection_policy}, not {chosen.policy}"
    if receipt.terminal_call_id != chosen.terminal_call_id:
        return f"{receipt.terminal_call_id} is scored, not {chosen.terminal_call_id}"
    if sorted(selected) != sorted(wanted):
        return f"{selected}, not {wanted}"
    if chosen.call_ids is not None and selected != wanted:
        return f"{selected} stand in another order than {wanted}"
    if sorted(trains) != sorted(selected):
        return f"{trains} train, not {selected}"
    places = {call_id: place for place, call_id in enumerate(selected)}
    early = [one for one in selected if places.get(parents[one], -1) > places[one]]
    return f"{early} stand before what they continue" if early else ""


def check_rows(
    batches: Mapping[int, group_batch_pb2.GroupBatch],
    receipts: Mapping[str, receipt_pb2.Receipt],
    texts: Mapping[tuple[str, str], str],
) -> Faults:
    """Hold the delivered rows against the receipts: each selected generation has loss once (P4).

    Args:
        batches: what was delivered, by position.
        receipts: what the owner got, by rollout.
        texts: what harnesses got, by attempt and call.
    """
    faults = Faults()
    if sorted(batches) != list(range(1, len(batches) + 1)):
        faults.lost.append(f"positions between {sorted(batches)[:1]} and {sorted(batches)[-1:]}")
    loss: Counter[tuple[str, str]] = Counter()
    for batch in batches.values():
        for receipt in batch.receipts:
            if receipts.get(receipt.rollout_id) != receipt:
                faults.changed.append(f"the receipt of {receipt.rollout_id} in its group")
        for fault in _batch_faults(batch, texts):
            faults.changed.append(f"the rows of {batch.group_id}: {fault}")
        for row in batch.rows:
            for span in row.spans:
                segment = batch.segments[span.segment_index]
                loss[segment.capture_key, segment.call_id] += span.owns_loss
    wanted = Counter(
        (receipt.capture_key, call.call_id)
        for receipt in receipts.values()
        for call in receipt.calls
        if call.selected
    )
    faults.lost += [f"the loss of {'/'.join(name)}" for name in wanted - loss]
    faults.duplicated += [f"the loss of {'/'.join(name)}" for name in loss - wanted]
    return faults


def _batch_faults(
    batch: group_batch_pb2.GroupBatch, texts: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    """Say what is wrong with one group."""
    try:
        verify_offline(batch)
    except AssertionError as error:
        yield f"they are not what their digests say: {error}"
    by_slot: dict[int, list[_Line]] = {receipt.slot: [] for receipt in batch.receipts}
    kinds = Counter((row.slot, row.kind) for row in batch.rows)
    for row in batch.rows:
        owns = any(span.owns_loss for span in row.spans)
        if row.kind != TRAINING and owns:
            yield f"{row.row_id} has loss and does not train"
        if row.kind == TRAINING:
            calls = [batch.segments[span.segment_index].call_id for span in row.spans]
            owned = [span.owns_loss for span in row.spans]
            by_slot[row.slot].append(list(zip(calls, owned, strict=True)))
    generated = {(one.capture_key, one.call_id): _generation(one) for one in batch.segments}
    for receipt in batch.receipts:
        if by_slot[receipt.slot] != list(rows_of(receipt)):
            yield f"{receipt.rollout_id} has not the rows of its selection"
        if kinds[receipt.slot, PLACEHOLDER] != receipt.masked:
            yield f"{receipt.rollout_id} has {kinds[receipt.slot, PLACEHOLDER]} placeholders"
        trained = sum(
            len(generated.get((receipt.capture_key, call.call_id), ()))
            for call in receipt.calls
            if call.selected
        )
        if not receipt.masked and trained != receipt.generated_token_count:
            yield f"{receipt.rollout_id} trains {trained} tokens of what it generated"
    for name, tokens in generated.items():
        if name in texts and texts[name] != _text(tokens):
            yield f"{'/'.join(name)} was answered otherwise"


def rows_of(receipt: receipt_pb2.Receipt) -> Iterator[_Line]:
    """Give the rows that a receipt makes: of each its calls, and whether it owns their loss.

    Each endpoint of what is selected is a row; roots and siblings stand as they are selected, depth
    first; the first row that holds a call owns its loss.
    """
    parents = {call.call_id: call.parent_call_id for call in receipt.calls if call.selected}
    owned: set[str] = set()

    def below(path: list[str]) -> Iterator[_Line]:
        last = path[-1] if path else ""
        following = [one for one in receipt.selected_call_ids if parents.get(one) == last]
        if path and not following:
            yield [(one, one not in owned) for one in path]
            owned.update(path)
        for one in following:
            yield from below([*path, one])

    return below([])


def _generation(call: staged_call_pb2.StagedCall) -> list[int]:
    return words(call)[call.canonical.carry_token_count :]


def _text(tokens: Sequence[int]) -> str:
    """Give the text of ids of the scripted engine: those that are bytes."""
    return bytes(one for one in tokens if one < TURN_BEGIN).decode(errors="replace")


def texts_of(accounts: Iterable[Account]) -> dict[tuple[str, str], str]:
    """Give what every answer said, by attempt and call."""
    return {name: text for account in accounts for name, text in account.texts().items()}
