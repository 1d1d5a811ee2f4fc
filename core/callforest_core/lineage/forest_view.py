"""Forest mode: the committed calls of one attempt, and which of them a request continues.

Calls are found by their whole source history: one look-up of the request's last answer end, and
then counts and digests alone (docs/protocol.md, section "Forest-mode lineage"). What a verdict
costs does not depend on the number of calls. What is stored a call is of constant size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from callforest_core.lineage.native_ids import call_ids_in
from callforest_core.lineage.source import SourceBoundary, SourceProbe, SourceSummary

CANDIDATES_SHOWN: Final = 64
"""Most candidates that an ambiguity names; all of them are counted."""


class RootReason(StrEnum):
    """Why a call continues nothing."""

    NO_MODEL_ITEMS = "no_model_items"
    HISTORY_NOT_RECORDED = "history_not_recorded"
    RENDER_OPTIONS_CHANGED = "render_options_changed"
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


ForestVerdict: TypeAlias = ForestRoot | ForestMatch | AmbiguousHistory | ClaimRefused


class _Row(NamedTuple):
    """One committed call; `place` counts the calls of one history in commit order."""

    place: int
    prev_len: int
    chain_hash: bytes
    tool_content_digest: bytes


class _Key(NamedTuple):
    """A history: all records of it end with the same answer."""

    normalization_version: int
    atom_count: int
    source_digest: bytes


_Rows: TypeAlias = dict[str, _Row]


class ForestView:
    """The committed calls of one attempt. Pending and failed calls are not here."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        # By history, then by how it was rendered, then by call in commit order.
        self._rows: dict[_Key, dict[bytes, _Rows]] = {}

    def append(
        self, call_id: str, *, cum_len: int, chain_hash: bytes, summary: SourceSummary
    ) -> None:
        """Add a committed call: its whole length in tokens, its chain hash, its history."""
        key = _Key(summary.normalization_version, summary.atom_count, summary.source_digest)
        rendered = self._rows.setdefault(key, {}).setdefault(summary.render_digest, {})
        row = _Row(len(rendered), cum_len, chain_hash, summary.tool_content_digest)
        rendered[call_id] = row

    def resolve(self, probe: SourceProbe) -> ForestVerdict:
        """Return the verdict on a request; nothing changes."""
        found = self._resolve(probe)
        if probe.claimed_call_id is not None and isinstance(found, ForestRoot):
            return ClaimRefused(probe.claimed_call_id)
        return found

    def _resolve(self, probe: SourceProbe) -> ForestVerdict:
        if not probe.boundaries:
            return ForestRoot(RootReason.NO_MODEL_ITEMS)
        last = probe.boundaries[0]
        rendered = self._ending(probe, last)
        if rendered is None:
            return self._unknown(probe)
        rows = rendered.get(probe.render_digest)
        if rows is None:
            shared = _first_call(rendered)
            return ForestRoot(RootReason.RENDER_OPTIONS_CHANGED, shared, last.atom_count)
        if not probe.observations_follow:
            return ForestRoot(RootReason.NOT_OBSERVATIONS, next(iter(rows)), last.atom_count)
        return _chosen(rows, probe, last)

    def _ending(self, probe: SourceProbe, boundary: SourceBoundary) -> Mapping[bytes, _Rows] | None:
        version = probe.normalization_version
        return self._rows.get(_Key(version, boundary.atom_count, boundary.source_digest))

    def _unknown(self, probe: SourceProbe) -> ForestRoot:
        """Say how far the history of a root is known."""
        for boundary in probe.boundaries[1:]:
            rendered = self._ending(probe, boundary)
            if rendered is not None:
                shared, count = _first_call(rendered), boundary.atom_count
                return ForestRoot(RootReason.HISTORY_NOT_RECORDED, shared, count)
        return ForestRoot(RootReason.HISTORY_NOT_RECORDED)


def _chosen(rows: _Rows, probe: SourceProbe, last: SourceBoundary) -> ForestVerdict:
    """Choose among the calls with one history: by echoed ids, then by the claim."""
    left = rows
    if len(rows) > 1:
        # What is echoed is short, however many calls there are.
        named = [call_id for call_id in call_ids_in(probe.native_ids) if call_id in rows]
        if named:
            named.sort(key=lambda call_id: rows[call_id].place)
            left = {call_id: rows[call_id] for call_id in named}
    claimed = probe.claimed_call_id
    if claimed is not None:
        if claimed not in left:
            return ClaimRefused(claimed)
        left = {claimed: left[claimed]}
    if len(left) > 1:
        return AmbiguousHistory(tuple(islice(left, CANDIDATES_SHOWN)), len(left))
    [(call_id, row)] = left.items()
    exact = row.tool_content_digest == last.tool_content_digest
    return ForestMatch(call_id, row.prev_len, row.chain_hash, exact)


def _first_call(rendered: Mapping[bytes, _Rows]) -> str:
    return next(iter(next(iter(rendered.values()))))
