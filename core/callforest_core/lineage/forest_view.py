"""Forest mode: the committed calls of one attempt, and which of them a request continues.

Calls are found by their whole source history: one look-up of the request's last answer end, and
then counts and digests alone (docs/protocol.md, section "Forest-mode lineage"). What a verdict
costs does not depend on the number of calls. What is stored a call is of constant size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from callforest_core.lineage.native_ids import call_ids_in, names_call
from callforest_core.lineage.source import SourceBoundary, SourceProbe, SourceSummary

CANDIDATES_SHOWN: Final = 16
"""Most candidates that an ambiguity names; all of them are counted."""


class RootReason(StrEnum):
    """Why a call continues nothing, in the order in which it is found out."""

    NO_MODEL_ITEMS = "no_model_items"
    UNREADABLE_ITEM = "unreadable_item"
    HISTORY_NOT_RECORDED = "history_not_recorded"
    RENDER_OPTIONS_CHANGED = "render_options_changed"
    NOT_OBSERVATIONS = "not_observations"


class ClaimFault(StrEnum):
    """Why a delta request does not continue the call that it claims."""

    NO_BOUNDARY = "no_boundary"
    NOT_THIS_CALL = "not_this_call"
    RENDER_OPTIONS = "render_options"
    NOT_OBSERVATIONS = "not_observations"


@dataclass(frozen=True, slots=True)
class ForestRoot:
    """The call starts a context of its own.

    `nearest_call_id` is the recorded call with the longest history that the request shares,
    `shared_atom_count` its length; None and 0 when there is none.
    """

    reason: RootReason
    nearest_call_id: str | None = None
    shared_atom_count: int = 0


@dataclass(frozen=True, slots=True)
class ForestMatch:
    """The call continues `parent_call_id`, whose `prev_len` tokens it inherits.

    `exact` is false when the histories spell a missing text differently; then the worker must
    prove that its renderer does not care.
    """

    parent_call_id: str
    prev_len: int
    chain_hash: bytes
    exact: bool


@dataclass(frozen=True, slots=True)
class AmbiguousHistory:
    """No call may be generated: several end where the request's history does.

    `candidates` names the first CANDIDATES_SHOWN in commit order, `candidate_count` counts all.
    """

    candidates: tuple[str, ...]
    candidate_count: int


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """No call may be generated: a delta request claims a call that its history does not end."""

    claimed_call_id: str
    fault: ClaimFault


ForestVerdict: TypeAlias = ForestRoot | ForestMatch | AmbiguousHistory | ClaimRefused


class _Row(NamedTuple):
    """One committed call; `place` counts the calls of one group in commit order."""

    place: int
    prev_len: int
    chain_hash: bytes
    tool_content_digest: bytes


class _Key(NamedTuple):
    """A history: all records of it end with the same answer."""

    normalization_version: int
    atom_count: int
    source_digest: bytes


class _Group:
    """The calls of one history and rendering, by call id in commit order.

    A candidate's row is looked up by what a request says of it, never searched for. `spelt`
    has the calls by how they spell missing text, `answered` by those response ids that the call
    id does not tell.
    """

    __slots__ = ("answered", "rows", "spelt")

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.spelt: dict[bytes, dict[str, None]] = {}
        self.answered: dict[str, list[str]] = {}

    def append(self, call_id: str, row: _Row, response_id: str) -> None:
        self.rows[call_id] = row
        self.spelt.setdefault(row.tool_content_digest, {})[call_id] = None
        if response_id and not names_call(response_id, call_id, ""):
            self.answered.setdefault(response_id, []).append(call_id)

    def named_by(self, native_ids: Iterable[str]) -> list[str]:
        """Give the calls that these ids name, in commit order."""
        named = {call_id for call_id in call_ids_in(native_ids) if call_id in self.rows}
        for native_id in native_ids:
            named.update(self.answered.get(native_id, ()))
        return sorted(named, key=lambda call_id: self.rows[call_id].place)


class ForestView:
    """The committed calls of one attempt. Pending, failed and withdrawn calls are not here."""

    __slots__ = ("_groups", "_places")

    def __init__(self) -> None:
        # By history, then by how it was rendered.
        self._groups: dict[_Key, dict[bytes, _Group]] = {}
        self._places: dict[str, tuple[_Key, bytes]] = {}

    def append(
        self,
        call_id: str,
        *,
        cum_len: int,
        chain_hash: bytes,
        summary: SourceSummary,
        response_id: str = "",
    ) -> None:
        """Add a committed call: its whole length in tokens, its chain hash, its history.

        Args:
            call_id: names it.
            cum_len: tokens of prompt and answer.
            chain_hash: 32 bytes.
            summary: of request and answer.
            response_id: the id of the response that was served.
        """
        key = _Key(summary.normalization_version, summary.atom_count, summary.source_digest)
        rendered = self._groups.setdefault(key, {})
        group = rendered.get(summary.render_digest)
        if group is None:
            group = rendered[summary.render_digest] = _Group()
        row = _Row(len(group.rows), cum_len, chain_hash, summary.tool_content_digest)
        group.append(call_id, row, response_id)
        self._places[call_id] = (key, summary.render_digest)

    def resolve(self, probe: SourceProbe) -> ForestVerdict:
        """Return the verdict on a request; nothing changes."""
        claimed = probe.claimed_call_id
        if claimed is not None and not probe.claim_breaks_ties:
            fault = self._claim_fault(probe, claimed)
            if fault is not None:
                return ClaimRefused(claimed, fault)
        if not probe.boundaries:
            unreadable = probe.has_unreadable_item
            reason = RootReason.UNREADABLE_ITEM if unreadable else RootReason.NO_MODEL_ITEMS
            return ForestRoot(reason)
        last = probe.boundaries[0]
        rendered = self._groups.get(_key(probe, last))
        if rendered is None:
            return self._unknown(probe)
        group = rendered.get(probe.render_digest)
        if group is None:
            shared = _first_call(rendered)
            return ForestRoot(RootReason.RENDER_OPTIONS_CHANGED, shared, last.atom_count)
        if not probe.observations_follow:
            shared = next(iter(group.rows))
            return ForestRoot(RootReason.NOT_OBSERVATIONS, shared, last.atom_count)
        return _chosen(group, probe, last)

    def _claim_fault(self, probe: SourceProbe, claimed: str) -> ClaimFault | None:
        """Say why the claimed call is no candidate of a delta request, or None."""
        if not probe.boundaries:
            return ClaimFault.NO_BOUNDARY
        key, render = self._places.get(claimed, (None, b""))
        if key != _key(probe, probe.boundaries[0]):
            return ClaimFault.NOT_THIS_CALL
        if render != probe.render_digest:
            return ClaimFault.RENDER_OPTIONS
        return None if probe.observations_follow else ClaimFault.NOT_OBSERVATIONS

    def _unknown(self, probe: SourceProbe) -> ForestRoot:
        """Say how far the history of a root is known."""
        for boundary in probe.boundaries[1:]:
            rendered = self._groups.get(_key(probe, boundary))
            if rendered is not None:
                shared, count = _first_call(rendered), boundary.atom_count
                return ForestRoot(RootReason.HISTORY_NOT_RECORDED, shared, count)
        return ForestRoot(RootReason.HISTORY_NOT_RECORDED)


def _chosen(group: _Group, probe: SourceProbe, last: SourceBoundary) -> ForestVerdict:
    """Choose among the calls with one history: by ids, by the claim, then by the spelling."""
    left: Collection[str] = group.rows
    if len(left) > 1:
        # What is echoed is short, however many calls there are.
        left = group.named_by(probe.native_ids) or left
    claimed = probe.claimed_call_id
    if claimed is not None:
        if claimed in left:
            left = (claimed,)
        elif not probe.claim_breaks_ties:
            return ClaimRefused(claimed, ClaimFault.NOT_THIS_CALL)
    if len(left) > 1:
        left = _spelt_alike(group, left, last.tool_content_digest) or left
    if len(left) > 1:
        return AmbiguousHistory(tuple(islice(left, CANDIDATES_SHOWN)), len(left))
    [call_id] = left
    row = group.rows[call_id]
    exact = row.tool_content_digest == last.tool_content_digest
    return ForestMatch(call_id, row.prev_len, row.chain_hash, exact)


def _spelt_alike(group: _Group, left: Collection[str], spelling: bytes) -> Collection[str]:
    """Give those of the calls that spell missing text as the request does, in commit order."""
    alike = group.spelt.get(spelling, {})
    if left is group.rows:
        return alike
    return [call_id for call_id in left if call_id in alike]


def _key(probe: SourceProbe, boundary: SourceBoundary) -> _Key:
    return _Key(probe.normalization_version, boundary.atom_count, boundary.source_digest)


def _first_call(rendered: Mapping[bytes, _Group]) -> str:
    return next(iter(next(iter(rendered.values())).rows))
