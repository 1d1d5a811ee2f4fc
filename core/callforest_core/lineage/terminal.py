"""Which call the scored response is: witnesses first, parent links second (contract 5).

Witnesses testify independently and are never ranked: they attribute only what all of them name,
and a contradiction attributes nothing, because it is the trace of a defect.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.fingerprint import (
    FINGERPRINT_VERSION,
    UnreadableItemError,
    assistant_fingerprint,
    is_model_authored,
)


class Witness(StrEnum):
    """Who names a call, in the order in which agreeing witnesses label the result."""

    EXPLICIT = "explicit"
    DECLARED = "declared"
    RESPONSE_ID = "response_id"
    CONTENT = "content"


class TerminalStage(StrEnum):
    """The stage of a terminal selection, as a receipt records it."""

    DECLARED = "declared"
    RESPONSE_ID = "response_id"
    CONTENT = "content"
    HEURISTIC = "heuristic"


class SelectionReason(StrEnum):
    """How the parent-link heuristic ended."""

    SELECTED = "selected"
    NO_RECORDS = "no_records"
    DUPLICATE_CALL_ID = "duplicate_call_id"
    ORPHANED_ROW = "orphaned_row"
    NO_ROOT = "no_root"
    AMBIGUOUS_TERMINAL = "ambiguous_terminal"


@dataclass(frozen=True, slots=True)
class TerminalAttribution:
    """What the witnesses say.

    `method` is the first agreeing witness, None when nothing is attributed. `reason` is the
    trail of abstentions and corroborations, comma-joined. `witnesses` are all that named a call,
    so an unattributed result with witnesses is a contradiction.
    """

    call_id: str | None
    method: Witness | None
    reason: str
    witnesses: tuple[Witness, ...]


@dataclass(frozen=True, slots=True)
class TerminalSelection:
    """What the parent links say."""

    call_id: str | None
    reason: SelectionReason


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal call of a rollout, or None with the last stage tried: then it is masked.

    `trail` names what each stage found, for the receipt.
    """

    call_id: str | None
    stage: TerminalStage
    trail: str


def attribute_terminal(
    records: Sequence[CallRecord], response: object, declared_response_id: str | None
) -> Terminal:
    """Return the terminal call by the framework's precedence (seed 2 "receipt", contract 5.4).

    Declared, response-id and content witnesses; the heuristic only when nothing was declared and
    no witness named a call. A declared id that does not attribute masks, and so do witnesses
    that contradict each other.
    """
    attribution = resolve_terminal(records, response, declared_response_id, None)
    if attribution.method is not None:
        stage = TerminalStage(attribution.method.value)
        return Terminal(attribution.call_id, stage, attribution.reason)
    if declared_response_id:
        return Terminal(None, TerminalStage.DECLARED, attribution.reason)
    if attribution.witnesses:
        stage = TerminalStage(attribution.witnesses[-1].value)
        return Terminal(None, stage, attribution.reason)
    selection = select_terminal_call(records)
    trail = f"{attribution.reason},{selection.reason}"
    return Terminal(selection.call_id, TerminalStage.HEURISTIC, trail)


def resolve_terminal(
    records: Sequence[CallRecord],
    response: object,
    declared_response_id: str | None,
    explicit_call_id: str | None,
) -> TerminalAttribution:
    """Return the call that every witness names (contract 5.1, 5.2).

    `response` is the scored response as parsed JSON, in Responses shape; anything but an object
    is no witness. A declared id that names no single call ends the search. Content that cannot
    be read abstains.
    """
    trail: list[str] = []
    named: dict[Witness, CallRecord] = {}
    if explicit_call_id:
        explicit = {record.call_id: record for record in records}.get(explicit_call_id)
        if explicit is None:
            trail.append("explicit_terminal_not_captured")
        else:
            named[Witness.EXPLICIT] = explicit
    if declared_response_id:
        matches = [record for record in records if record.response_id == declared_response_id]
        declared = _one_sequence(matches)
        if declared is None:
            trail.append("declared_ambiguous" if matches else "declared_terminal_not_captured")
            return TerminalAttribution(None, None, ",".join(trail), tuple(named))
        named[Witness.DECLARED] = declared
    if isinstance(response, dict):
        _hear_response_id(records, str(response.get("id") or ""), named, trail)
        _hear_content(records, response.get("output"), named, trail)
    else:
        trail.append("no_response_object")
    return _agreement(named, trail)


def select_terminal_call(records: Sequence[CallRecord]) -> TerminalSelection:
    """Infer the terminal call from parent links (contract 5.3).

    From the earliest admitted root down, an extended sibling beats a childless one; two that
    could both be it are ambiguous. An admission time that is missing counts as last.
    """
    fault = _graph_fault(records)
    if fault is not None:
        return TerminalSelection(None, fault)
    children: dict[str | None, list[CallRecord]] = {}
    for record in records:
        children.setdefault(record.parent_call_id, []).append(record)
    if None not in children:
        return TerminalSelection(None, SelectionReason.NO_ROOT)
    # min keeps the first of equals: manifest order breaks ties.
    node = min(_survivors(children[None], children), key=_admission_order)
    while node.call_id in children:
        pool = _survivors(children[node.call_id], children)
        if len(pool) > 1:
            return TerminalSelection(None, SelectionReason.AMBIGUOUS_TERMINAL)
        node = pool[0]
    return TerminalSelection(node.call_id, SelectionReason.SELECTED)


def _hear_response_id(
    records: Sequence[CallRecord],
    response_id: str,
    named: dict[Witness, CallRecord],
    trail: list[str],
) -> None:
    """Hear the witness that the scored response's own id is."""
    if not response_id:
        trail.append("response_has_no_id")
        return
    matches = [record for record in records if record.response_id == response_id]
    winner = _one_sequence(matches)
    if winner is not None:
        named[Witness.RESPONSE_ID] = winner
    else:
        trail.append("response_id_ambiguous" if matches else "response_id_no_match")


def _hear_content(
    records: Sequence[CallRecord],
    output: object,
    named: dict[Witness, CallRecord],
    trail: list[str],
) -> None:
    """Hear the witness that the scored response's items are.

    Three readings compete in one pool: the whole conversation, a call's own output, and the
    trailing model-authored run of a merged transcript.
    """
    if not isinstance(output, list) or not output:
        trail.append("response_has_no_output")
        return
    items = [item for item in output if isinstance(item, dict)]
    try:
        target = assistant_fingerprint(items)
    except UnreadableItemError:
        trail.append("response_output_unfingerprintable")
        return
    if not target:
        trail.append("no_model_authored_output")
        return
    outputs = {target, _tail_fingerprint(items)} - {None}
    matches = {
        record.call_id: record
        for record in records
        if record.fingerprint_version == FINGERPRINT_VERSION
        and (record.continuation_fingerprint == target or record.output_fingerprint in outputs)
    }
    winner = _one_sequence(list(matches.values()))
    if winner is not None:
        named[Witness.CONTENT] = winner
    else:
        trail.append("content_ambiguous" if matches else "no_content_match")


def _tail_fingerprint(items: Sequence[dict[str, object]]) -> bytes | None:
    """Fingerprint the trailing model-authored run, None when there is none or it is all."""
    start = len(items)
    while start and is_model_authored(items[start - 1]):
        start -= 1
    return assistant_fingerprint(items[start:]) if 0 < start < len(items) else None


def _agreement(named: dict[Witness, CallRecord], trail: list[str]) -> TerminalAttribution:
    witnesses = tuple(named)
    if not witnesses:
        return TerminalAttribution(None, None, ",".join(trail), ())
    if _one_sequence(list(named.values())) is None:
        detail = ";".join(f"{name}={record.call_id}" for name, record in named.items())
        trail.append(f"witness_disagreement[{detail}]")
        return TerminalAttribution(None, None, ",".join(trail), witnesses)
    if len(witnesses) > 1:
        trail.append("corroborated_by=" + "+".join(witnesses[1:]))
    first = witnesses[0]
    return TerminalAttribution(named[first].call_id, first, ",".join(trail), witnesses)


def _one_sequence(candidates: Sequence[CallRecord]) -> CallRecord | None:
    """Return the smallest call id of candidates with one token sequence, else None.

    Calls with equal sequences train alike, so it does not matter which of them is named.
    """
    sequences = {(call.cumulative_hash, call.chain_hash, call.cum_len) for call in candidates}
    if len(sequences) != 1:
        return None
    return min(candidates, key=lambda call: call.call_id)


def _graph_fault(records: Sequence[CallRecord]) -> SelectionReason | None:
    if not records:
        return SelectionReason.NO_RECORDS
    counts = Counter(record.call_id for record in records)
    if len(counts) != len(records):
        return SelectionReason.DUPLICATE_CALL_ID
    parents = {record.parent_call_id for record in records} - {None}
    if not parents <= counts.keys():
        return SelectionReason.ORPHANED_ROW
    return None


def _survivors(
    candidates: list[CallRecord], children: dict[str | None, list[CallRecord]]
) -> list[CallRecord]:
    """Return the candidates that were extended, or all of them when none was."""
    return [call for call in candidates if call.call_id in children] or candidates


def _admission_order(record: CallRecord) -> tuple[bool, float]:
    return (record.admitted_at is None, record.admitted_at or 0.0)
