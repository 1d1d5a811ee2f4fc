"""Whether an attempt can be restored from a point, and the log that the next attempt begins with.

Pure. What is refused has opened and sealed nothing (docs/protocol.md, "Restored attempts").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from callforest.capture.v1 import attempt_pb2, call_record_pb2, restore_point_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import call_record_from_proto
from callforest_core.custody.attempts import AttemptName
from callforest_core.custody.restore import (
    CAPTURE_SCHEMA,
    RESTORED_MAX,
    restore_digest,
    with_ancestors,
)
from callforest_core.forest.selection import in_intent_order
from callforest_core.lineage.source import SOURCE_VERSION
from callforest_mesh.ledger import restore_refusals as refusals
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.core import opened_event
from callforest_mesh.ledger.outline import FOREST

_OPENING_EVENTS: Final = 1
"""Events of an attempt that was opened and nothing else, its restored calls apart."""


@dataclass(frozen=True, slots=True)
class Point:
    """A restore point of this capture schema.

    Attributes:
        capture_key: the attempt that made or restored the calls.
        call_ids: the named calls, sorted, each once.
        digest: of the point, by which a repeat is known.
    """

    capture_key: str
    call_ids: tuple[str, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Restored:
    """An attempt that was restored.

    Attributes:
        attempt: as its readers see it.
        is_repeat: whether an earlier request had restored it.
    """

    attempt: attempt_pb2.Attempt
    is_repeat: bool


def read_point(message: restore_point_pb2.RestorePoint) -> Point:
    """Read a point.

    Raises:
        Refusal: RESTORE_REFUSED, capture_schema (LED-10).
    """
    if message.capture_schema != CAPTURE_SCHEMA:
        raise refusals.foreign_schema(message.capture_key, message.capture_schema)
    call_ids = tuple(sorted(set(message.call_ids), key=str.encode))
    digest = restore_digest(message.capture_schema, message.capture_key, call_ids)
    return Point(message.capture_key, call_ids, digest)


def check_repeat(view: AttemptView, point: Point) -> None:
    """Refuse a repeat that is none, or whose attempt was used since.

    Args:
        view: of the attempt that the same request opened.
        point: of the repeat.

    Raises:
        Refusal: RESTORE_REFUSED, repeat_differs or in_use.
    """
    opened = view.opened
    if opened.restore_digest != point.digest:
        raise refusals.repeat_differs(opened.capture_key)
    if view.revision != _OPENING_EVENTS + opened.restored_count:
        raise refusals.in_use(opened.capture_key)


def restored_events(
    view: AttemptView, point: Point, request_id: str
) -> tuple[ledger_event_pb2.LedgerEvent, ...]:
    """Make the log that the next attempt of a rollout begins with.

    Args:
        view: of the rollout's latest attempt, which the point names.
        point: names the calls.
        request_id: the opener's.

    Raises:
        Refusal: RESTORE_REFUSED, capture_poisoned, call_not_restorable or too_many_calls.
    """
    opened = view.opened
    if failed := view.lost_call_ids():
        raise refusals.poisoned(opened.capture_key, failed)
    parents = view.parents()
    missing = [call_id for call_id in point.call_ids if call_id not in parents]
    if missing:
        raise refusals.not_restorable(opened.capture_key, missing)
    taken = with_ancestors(parents, point.call_ids)
    if len(taken) > RESTORED_MAX:
        raise refusals.too_many(opened.capture_key, len(taken), RESTORED_MAX)
    records = list(view.records(taken))
    if foreign := [one.coords.call_id for one in records if not _can_be_continued(view, one)]:
        raise refusals.other_rules(opened.capture_key, foreign)
    name = AttemptName(opened.rollout_id, opened.attempt_number + 1)
    first = opened_event(opened.tenant, *name, request_id, view.mode)
    first.attempt_opened.restored_from = opened.capture_key
    first.attempt_opened.restored_count = len(taken)
    first.attempt_opened.restore_digest = point.digest
    first.attempt_opened.configuration_digest = view.configuration_digest
    places = _places(records, are_numbered=view.are_numbered)
    return (first, *_copied(records, places, name.capture_key))


def _can_be_continued(view: AttemptView, record: call_record_pb2.CallRecord) -> bool:
    """Say whether requests are still digested by the rules of a record's summary."""
    has_summary = view.mode == FOREST and record.HasField("replay")
    return not has_summary or record.replay.normalization_version == SOURCE_VERSION


def _places(records: Sequence[call_record_pb2.CallRecord], *, are_numbered: bool) -> dict[str, int]:
    """Number calls from 1, in the order in which their attempt announced them.

    Args:
        records: of some of the attempt's calls.
        are_numbered: whether all of its records have numbers; else its order is that of times.
    """
    calls = [call_record_from_proto(record) for record in records]
    if not are_numbered:
        calls = [replace(call, intent_number=None) for call in calls]
    return {call.call_id: place for place, call in enumerate(in_intent_order(calls), 1)}


def _copied(
    records: Sequence[call_record_pb2.CallRecord], places: Mapping[str, int], capture_key: str
) -> list[ledger_event_pb2.LedgerEvent]:
    """Copy records into another attempt; each says under which attempt it and its parent are.

    There they are the first calls, in the order in which they were announced.

    Args:
        records: each behind what it continues.
        places: the number of each call there.
        capture_key: the attempt that takes them over.
    """
    events: list[ledger_event_pb2.LedgerEvent] = []
    for record in records:
        event = ledger_event_pb2.LedgerEvent(restored=record)
        copied = event.restored
        made_in = copied.coords.capture_key
        copied.source_capture_key = copied.source_capture_key or made_in
        if copied.coords.HasField("parent_call_id"):
            copied.coords.parent_capture_key = copied.coords.parent_capture_key or made_in
        copied.coords.capture_key = capture_key
        copied.intent_number = places[copied.coords.call_id]
        events.append(event)
    return events
