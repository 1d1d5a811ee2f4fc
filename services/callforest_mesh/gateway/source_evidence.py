"""What forest mode knows of a request's history: its atoms, digested, and what is kept of them.

Contract: docs/lineage.md, section 11.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
)
from callforest_client.source_codec import output_summary_to_proto, source_summary_to_proto
from callforest_core.lineage.atoms import atoms_of
from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.difference import certainty, difference, option_difference
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Dialect, Item
from callforest_core.lineage.source import SourceHistory, output_summary
from callforest_mesh.gateway.body_start import BodyStart
from callforest_mesh.gateway.evidence import ServedResponse
from callforest_mesh.gateway.histories import Histories, KeptCall, RenderOptions, Turns
from callforest_mesh.gateway.json_body import write_items
from callforest_mesh.gateway.response_input import messages_of

_COMPARED_ROOTS: Final = 32
"""With so many conversations of its attempt a history is compared, those that grew last."""
_COMPARED_ENDS: Final = 32
_COMPARED_BYTES: Final = 1 << 20
"""Turns that a request is compared with at a time: some tens of milliseconds of the gateway."""
"""And of the one that it shares most with, with so many ways in which it went on."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceEvidence:
    """A request's history in forest mode.

    Attributes:
        probe: what the ledger needs to find the predecessor.
        capture_key: the attempt.
        dialect: the request's API.
        history: the request's atoms, digested.
        options: what decides, beside the turns, how the request becomes tokens.
        known: the call with whose request this one begins, None when none is kept.
        echoed: the answer of `known`, where a delta request left it out.
        new_items: the request's items behind those of `known`.
        new_messages: the same as the engine takes them, in Chat's form.
        turn_count: how many turns of the request these are.
        start: with what the request begins; None for a delta request.
        histories: where it is kept once it is served.
    """

    probe: capture_admission_pb2.SourceProbe
    capture_key: str
    dialect: Dialect
    history: SourceHistory
    options: RenderOptions
    known: KeptCall | None
    echoed: Turns | None
    new_items: list[object]
    new_messages: list[object]
    turn_count: int
    start: BodyStart | None
    histories: Histories

    def announce(self, intent: attempt_pb2.CallIntent) -> None:
        """Put the probe into an announcement."""
        intent.source.CopyFrom(self.probe)

    def describe(self, record: call_record_pb2.CallRecord, served: ServedResponse) -> None:
        """Put into a record by what a later request finds the call."""
        if served.items is None:
            return
        try:
            summary = self.history.extended(served.items).summary(self.options.digest)
            output = output_summary(served.items)
        except UnreadableItemError:
            return  # such a call is never a predecessor
        record.replay.CopyFrom(source_summary_to_proto(summary))
        record.output.CopyFrom(output_summary_to_proto(output))

    def explain(
        self, verdict: capture_admission_pb2.Verdict
    ) -> call_record_pb2.HistoryDifference | None:
        """Say where the request left the history before it; None when it did not."""
        root = verdict.root
        if root.reason == capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED:
            return self._changed_option(root.nearest_call_id)
        if root.reason != capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED:
            return None
        left = self._left(root.nearest_call_id)
        return _unknown(root.nearest_call_id) if left is None else left

    def _left(self, nearest_call_id: str) -> call_record_pb2.HistoryDifference | None:
        """Compare with the attempt's conversations; name the difference from the likeliest."""
        before = [] if self.known is None else self.known.request_parts()
        if _size(before) > _COMPARED_BYTES:
            return None  # nobody may wait for what is for people
        comparison = _Comparison(self, [*_atoms(before), *atoms_of(self.new_items)])
        # Calls that the request goes on from, but for what it made of their answers.
        nearest = self.histories.get(self.capture_key, nearest_call_id)
        left = [call for call in (nearest, self.known) if call is not None]
        roots = self.histories.newest_of_roots(self.capture_key, _COMPARED_ROOTS)
        likeliest = comparison.likeliest(_within_bounds([*left, *roots]))
        if likeliest is None:
            return None
        ends = self.histories.ends_of(likeliest.root, _COMPARED_ENDS)
        likeliest = comparison.likeliest([likeliest, *_within_bounds(ends)])
        return None if likeliest is None else comparison.with_call(likeliest)

    def keep(self, call_id: str, served: ServedResponse) -> None:
        """Keep what the call added to the history, now that it can be a predecessor."""
        if served.items is None:
            return
        history = self.history.extended(served.items)
        if history.fault is not None:
            return
        known, options = self.known, self.options
        if known is not None and _is_same(known.options, options):
            options = known.options
        call = KeptCall(
            capture_key=self.capture_key,
            call_id=call_id,
            dialect=self.dialect,
            parent=known,
            asked=self._asked(),
            answer=self._answer(served.items, served.message),
            request_history=self.history,
            history=history,
            options=options,
            start=self.start,
        )
        self.histories.keep(call)

    def _answer(self, items: list[Item], message: Item) -> Turns:
        """Give the answer as a harness echoes it."""
        if self.dialect is Dialect.RESPONSES:
            messages = write_items(messages_of(items, None))
            return Turns(write_items(items), messages, len(items))
        # Null and empty fields count for nothing, but for how a missing text is spelt.
        said = {
            name: value
            for name, value in message.items()
            if name == "content" or value not in (None, "", [], {})
        }
        echoed = write_items([{"role": "assistant", **said}])
        return Turns(echoed, echoed, 1)

    def _asked(self) -> Turns:
        items = write_items(self.new_items)
        same = self.new_messages is self.new_items
        messages = items if same else write_items(self.new_messages)
        if self.echoed is None:
            return Turns(items, messages, self.turn_count)
        whole = b",".join((self.echoed.items, items))
        if not same or self.echoed.messages is not self.echoed.items:
            return Turns(whole, b",".join((self.echoed.messages, messages)), self.turn_count)
        return Turns(whole, whole, self.turn_count)

    def _changed_option(self, call_id: str) -> call_record_pb2.HistoryDifference:
        nearest = self.histories.get(self.capture_key, call_id)
        if nearest is None:
            return _unknown(call_id)
        recorded, sent = (json.loads(one.values) for one in (nearest.options, self.options))
        try:
            changed = option_difference(recorded, sent)
        except CanonicalJsonError:
            changed = None  # an option without normal form, whose digest is like no other
        if changed is None:
            return _unknown(call_id)
        return call_record_pb2.HistoryDifference(
            kind=changed.kind,
            against_call_id=call_id,
            atom_index=nearest.history.atom_count,
            detail=changed.name,
        )


def _size(parts: Iterable[Turns]) -> int:
    return sum(len(part.items) for part in parts)


def _within_bounds(calls: Iterable[KeptCall]) -> list[KeptCall]:
    """Give calls, the first first, that have no more than _COMPARED_BYTES of turns together."""
    taken: list[KeptCall] = []
    left = _COMPARED_BYTES
    for call in calls:
        size = _size(call.parts())
        if size <= left:
            taken.append(call)
            left -= size
    return taken


def _atoms(parts: list[Turns]) -> Iterator[bytes]:
    for part in parts:
        yield from atoms_of(json.loads(b"[" + part.items + b"]"))


class _Comparison:
    """A request, compared with kept calls; each turn of them is read once.

    Args:
        evidence: the request's.
        sent: its atoms.
    """

    def __init__(self, evidence: SourceEvidence, sent: list[bytes]) -> None:
        self._evidence = evidence
        self._sent = sent
        self._atoms: dict[Turns, list[bytes]] = {}
        self._found: dict[KeptCall, call_record_pb2.HistoryDifference] = {}

    def with_call(self, call: KeptCall) -> call_record_pb2.HistoryDifference:
        """Compare with a call; a request that only goes on differs behind it."""
        if call not in self._found:
            found = difference(self._atoms_of(call), self._sent)
            rewritten = call_record_pb2.DIFFERENCE_CLASS_REWRITTEN_HISTORY
            self._found[call] = call_record_pb2.HistoryDifference(
                kind=found.kind if found else rewritten,
                against_call_id=call.call_id,
                atom_index=found.atom_index if found else call.history.atom_count,
            )
        return self._found[call]

    def likeliest(self, calls: list[KeptCall]) -> KeptCall | None:
        """Give the call whose history the request is likeliest to have left; of equals the first.

        It shares most; then the difference is one that no accident makes; then it was asked in the
        same way.
        """
        return max(calls, key=self._likelihood, default=None)

    def _likelihood(self, call: KeptCall) -> tuple[int, int, int]:
        found = self.with_call(call)
        same_dialect = call.dialect is self._evidence.dialect
        same_options = call.options.digest == self._evidence.options.digest
        return found.atom_index, certainty(found.kind), same_dialect + same_options

    def _atoms_of(self, call: KeptCall) -> Iterator[bytes]:
        for part in call.parts():
            if part not in self._atoms:
                self._atoms[part] = list(_atoms([part]))
            yield from self._atoms[part]


def _unknown(call_id: str) -> call_record_pb2.HistoryDifference:
    return call_record_pb2.HistoryDifference(
        kind=call_record_pb2.DIFFERENCE_CLASS_NOT_KNOWN, against_call_id=call_id
    )


def _is_same(one: RenderOptions, other: RenderOptions) -> bool:
    return (one.digest, one.instructions) == (other.digest, other.instructions)
