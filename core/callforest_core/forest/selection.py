"""Which calls of a rollout train, and what is wrong with a choice (docs/protocol.md, 7b).

A choice is a policy's or its owner's; it is never corrected. What contradicts the record or itself
is refused with a fault, since whoever chose must look; what is only unfit for training masks its
rollout.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from callforest_core.custody.call import CallRecord

RETURNED_HISTORY: Final = "returned_history"
ALL_CAPTURED: Final = "all_captured"
EXPLICIT: Final = "explicit"
LENGTH: Final = "length"
"""The finish reason of a generation that was cut at its limit of tokens."""
_COMPLETED: Final = "completed"
_INCOMPLETE: Final = "incomplete"


class SelectionFault(StrEnum):
    """What is wrong with the evidence of a selection."""

    HISTORY_MISSING = "history_missing"
    HISTORY_UNREADABLE = "history_unreadable"
    HISTORY_CONTRADICTS_REFERENCES = "history_contradicts_references"
    ANSWER_NOT_CAPTURED = "answer_not_captured"
    ANSWER_SPLIT = "answer_split"
    ANSWER_REORDERED = "answer_reordered"
    ANSWER_DUPLICATED = "answer_duplicated"
    ANSWER_AMBIGUOUS = "answer_ambiguous"
    NORMALIZATION_UNSUPPORTED = "normalization_unsupported"
    REFERENCE_UNKNOWN = "reference_unknown"
    REFERENCE_DUPLICATED = "reference_duplicated"
    POLICY_EMPTY = "policy_empty"
    POLICY_DUPLICATED = "policy_duplicated"
    POLICY_UNKNOWN = "policy_unknown"
    POLICY_CHANGED_RECORD = "policy_changed_record"
    POLICY_FAILED = "policy_failed"
    TERMINAL_MISSING = "terminal_missing"
    TERMINAL_AMBIGUOUS = "terminal_ambiguous"
    TERMINAL_NOT_SELECTED = "terminal_not_selected"
    COMPLETION_MISSING = "completion_missing"


class SelectionRefusedError(ValueError):
    """What was selected, or the evidence for it, cannot be taken.

    Attributes:
        fault: what is wrong.
        detail: the same for a person.
        call_ids: the calls at fault, as far as they are known.
    """

    def __init__(
        self, fault: SelectionFault, detail: str = "", call_ids: Iterable[str] = ()
    ) -> None:
        super().__init__(f"{fault}: {detail}" if detail else str(fault))
        self.fault = fault
        self.detail = detail
        self.call_ids = tuple(call_ids)


class CallReason(StrEnum):
    """Why a call of a receipt trains or does not."""

    SELECTED = "selected"
    NOT_RETURNED = "not_returned"
    LEAF_NOT_COMPLETED = "leaf_not_completed"
    NOT_CHOSEN = "not_chosen"
    CAPTURE_FAILED = "capture_failed"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class Selection:
    """The calls that train.

    Attributes:
        call_ids: in the order of their priority.
        terminal_call_id: the scored call, one of them.
        policy: what chose them: `returned_history`, `all_captured`, `explicit` or the name of a
            custom policy.
        left_out: why the other calls do not train.
        failed: calls that were chosen and are none of them, since they or what they continue
            failed; empty unless what is verified of an incomplete attempt trains (FIN-8).
    """

    call_ids: tuple[str, ...]
    terminal_call_id: str
    policy: str
    left_out: CallReason
    failed: frozenset[str] = frozenset()

    def reasons_of(self, call_ids: Iterable[str], *, masked: bool) -> list[CallReason]:
        """Say of each call of the attempt why it trains or does not."""
        chosen = frozenset(self.call_ids)
        inside = CallReason.MASKED if masked else CallReason.SELECTED
        outside = dict.fromkeys(self.failed, CallReason.CAPTURE_FAILED)
        return [
            inside if call_id in chosen else outside.get(call_id, self.left_out)
            for call_id in call_ids
        ]


def in_intent_order(records: Iterable[CallRecord]) -> list[CallRecord]:
    """Order records as their calls were announced; when they finished does not count.

    The ledger numbers them. Records of earlier releases have no number: where one has none, all are
    ordered by the times at which a gateway took them, a clock that can be set back. So that the
    order stays one in which calls can have been announced, none stands before the call that it
    continues.
    """
    given = list(records)
    numbered = all(record.intent_number is not None for record in given)
    every = sorted(given, key=_by_number if numbered else _by_clock)
    known = {one.call_id for one in every}
    children: dict[str, list[int]] = {}
    ready: list[int] = []  # places in `every`, so that the smallest was announced first
    for place, record in enumerate(every):
        if record.parent_call_id in known:
            children.setdefault(record.parent_call_id or "", []).append(place)
        else:
            ready.append(place)
    ordered: list[CallRecord] = []
    while ready:
        record = every[heapq.heappop(ready)]
        ordered.append(record)
        for place in children.pop(record.call_id, ()):
            heapq.heappush(ready, place)
    # What is left leads back to itself, which verification refuses.
    return ordered + [one for one in every if one.parent_call_id in children]


def _by_number(record: CallRecord) -> tuple[float, str]:
    assert record.intent_number is not None
    return record.intent_number, record.call_id


def _by_clock(record: CallRecord) -> tuple[float, str]:
    when = math.inf if record.admitted_at is None else record.admitted_at
    return when, record.call_id


def all_captured(records: Sequence[CallRecord], terminal_call_id: str) -> tuple[str, ...]:
    """Select every call but unscored leaves that did not complete (SEL-3), in intent order.

    Those stay that have children or are scored: that they did not complete must be seen. A call
    that was cut at its limit of tokens counts as completed.

    Raises:
        SelectionRefusedError: a record does not say how its generation ended.
    """
    parents = {record.parent_call_id for record in records}
    chosen = []
    for record in in_intent_order(records):
        _check_completion(record)
        leaf = record.call_id not in parents and record.call_id != terminal_call_id
        if not leaf or is_complete(record):
            chosen.append(record.call_id)
    return tuple(chosen)


def checked_policy_answer(
    records: Sequence[CallRecord], selected: object, terminal_response_id: object
) -> tuple[tuple[str, ...], str]:
    """Hold what a custom policy gave against the attempt (SEL-4).

    Args:
        records: the attempt's calls as they are, whatever the policy did to its own copies.
        selected: a list or tuple of the records that train.
        terminal_response_id: the served response id of the scored one among them.

    Returns:
        The selected call ids, and the scored one.

    Raises:
        SelectionRefusedError: it is not a choice of this attempt's calls.
    """
    if not isinstance(selected, list | tuple):
        detail = f"selected is {type(selected).__name__}, not a list"
        raise SelectionRefusedError(SelectionFault.POLICY_UNKNOWN, detail)
    known = {record.call_id: record for record in records}
    chosen: list[CallRecord] = []
    for one in selected:
        if not isinstance(one, CallRecord) or one.call_id not in known:
            named = [one.call_id] if isinstance(one, CallRecord) else []
            detail = "it selected what is no record of the attempt"
            raise SelectionRefusedError(SelectionFault.POLICY_UNKNOWN, detail, named)
        if one != known[one.call_id]:
            raise SelectionRefusedError(SelectionFault.POLICY_CHANGED_RECORD, "", [one.call_id])
        chosen.append(known[one.call_id])
    call_ids = checked_choice(known, [one.call_id for one in chosen])
    if not isinstance(terminal_response_id, str) or not terminal_response_id:
        raise SelectionRefusedError(SelectionFault.TERMINAL_MISSING, "the policy names none")
    scored = [one.call_id for one in chosen if one.response_id == terminal_response_id]
    if len(scored) > 1:
        raise SelectionRefusedError(SelectionFault.TERMINAL_AMBIGUOUS, "", scored)
    if not scored:
        detail = f"no selected call was served as {terminal_response_id!r}"
        raise SelectionRefusedError(SelectionFault.TERMINAL_NOT_SELECTED, detail)
    return call_ids, scored[0]


def checked_choice(known: Iterable[str], call_ids: Sequence[str]) -> tuple[str, ...]:
    """Refuse a choice that is empty, names a call twice, or one that the attempt has not.

    Raises:
        SelectionRefusedError: with the first fault.
    """
    if not call_ids:
        raise SelectionRefusedError(SelectionFault.POLICY_EMPTY)
    counts = Counter(call_ids)
    if twice := [one for one in counts if counts[one] > 1]:
        raise SelectionRefusedError(SelectionFault.POLICY_DUPLICATED, "", twice)
    if unknown := sorted(set(counts) - set(known)):
        raise SelectionRefusedError(SelectionFault.POLICY_UNKNOWN, "not captured", unknown)
    return tuple(call_ids)


def check_terminal(call_ids: Sequence[str], terminal_call_id: str) -> None:
    """Refuse a selection without its scored call, which may stand anywhere in it (SEL-6).

    Raises:
        SelectionRefusedError: the scored call is not selected.
    """
    if terminal_call_id not in call_ids:
        detail = "the scored call is not selected"
        raise SelectionRefusedError(
            SelectionFault.TERMINAL_NOT_SELECTED, detail, [terminal_call_id]
        )


def incomplete_call(records: Mapping[str, CallRecord], call_ids: Iterable[str]) -> str | None:
    """Name the first selected call that did not complete, or None (SEL-8).

    Raises:
        SelectionRefusedError: a selected record does not say how its generation ended.
    """
    chosen = [records[call_id] for call_id in call_ids]
    for record in chosen:
        _check_completion(record)
    return next((record.call_id for record in chosen if not is_complete(record)), None)


def open_call(records: Mapping[str, CallRecord], call_ids: Sequence[str]) -> str | None:
    """Name the first selected call whose parent is not selected, or None (SEL-5)."""
    chosen = set(call_ids)
    return next(
        (one for one in call_ids if (records[one].parent_call_id or one) not in chosen), None
    )


def without_failed(
    records: Mapping[str, CallRecord], selection: Selection, failed: Collection[str]
) -> Selection | None:
    """Leave out of a selection what failed and all that continues it (FIN-8).

    Returns:
        None when the scored call is left out, which leaves nothing to train.
    """
    tainted = set(failed)
    for record in sorted(records.values(), key=lambda one: one.prev_len):  # parents first
        if record.parent_call_id in tainted:
            tainted.add(record.call_id)
    if selection.terminal_call_id in tainted:
        return None
    kept = tuple(call_id for call_id in selection.call_ids if call_id not in tainted)
    return replace(
        selection, call_ids=kept, failed=frozenset(selection.call_ids) & frozenset(tainted)
    )


def is_complete(record: CallRecord) -> bool:
    """Say whether a generation ended by itself or at its limit of tokens."""
    if record.status == _INCOMPLETE:
        return record.finish_reason == LENGTH
    return record.status == _COMPLETED


def _check_completion(record: CallRecord) -> None:
    """Refuse a record without a status, or of an incomplete call without its reason."""
    if not record.status or (record.status == _INCOMPLETE and not record.finish_reason):
        detail = "the record does not say how its generation ended"
        raise SelectionRefusedError(SelectionFault.COMPLETION_MISSING, detail, [record.call_id])
