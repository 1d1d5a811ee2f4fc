"""What a request continues, as the verdict that its caller gets. Pure.

Chain mode finds a call by what models wrote and never makes a root of what it cannot resolve.
Forest mode finds it by its whole history, makes a root of what it does not know, and refuses what
it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_service_pb2
from callforest_client.source_codec import source_probe_from_proto
from callforest_core.lineage.chain import (
    ChainProbe,
    ChainView,
    Match,
    Root,
    Unresolved,
    UnresolvedReason,
    Verdict,
)
from callforest_core.lineage.fingerprint import FINGERPRINT_VERSION
from callforest_core.lineage.forest_view import (
    AmbiguousHistory,
    ClaimRefused,
    ForestMatch,
    ForestRoot,
    ForestView,
    RootReason,
)
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.attempt import AttemptView

UNRESOLVED_PARENT: Final = "unresolved_parent"
"""Failure reason of a call without a predecessor, or with more than one."""
DETAIL_MAX: Final = 1024

_PROBE_MODES: Final = {
    "chain": attempt_pb2.CAPTURE_MODE_CHAIN,
    "source": attempt_pb2.CAPTURE_MODE_FOREST,
}
_ROOT_REASONS: Final = {
    RootReason.NO_MODEL_ITEMS: capture_admission_pb2.ROOT_REASON_NO_MODEL_ITEMS,
    RootReason.HISTORY_NOT_RECORDED: capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED,
    RootReason.RENDER_OPTIONS_CHANGED: capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED,
    RootReason.NOT_OBSERVATIONS: capture_admission_pb2.ROOT_REASON_NOT_OBSERVATIONS,
}


def judge(
    view: AttemptView,
    asked: attempt_pb2.CallIntent | ledger_service_pb2.FindPredecessorRequest,
) -> capture_admission_pb2.Verdict:
    """Say whom a call would continue now, of an attempt that takes calls."""
    which = asked.WhichOneof("probe")
    mode = attempt_pb2.CAPTURE_MODE_UNSPECIFIED if which is None else _PROBE_MODES[which]
    if mode != view.mode:
        return refusals.refused_call(
            er.ERROR_REASON_MODE_MISMATCH,
            f"the attempt was opened in {mode_name(view.mode)} mode, and the call was probed for"
            f" {mode_name(mode)} mode; open the attempt in the mode of the gateway",
        )
    bound, stated = view.configuration_digest, asked.configuration_digest
    if bound and stated and bound != stated:
        return refusals.refused_call(
            er.ERROR_REASON_CONFIGURATION_CHANGED,
            f"the engine's configuration is {stated.hex()}, but the attempt began with"
            f" {bound.hex()}; open another attempt",
        )
    if view.forest is None:
        return judge_chain(view.chain, asked.chain)
    return judge_forest(view.forest, asked.source)


def judge_chain(
    chain: ChainView, probe: capture_admission_pb2.ChainProbe
) -> capture_admission_pb2.Verdict:
    """Say whom a request of chain mode continues; unresolved is never a root (ADM-1, P3)."""
    found = _resolve(chain, probe)
    if isinstance(found, Root):
        return capture_admission_pb2.Verdict(root=capture_admission_pb2.Root())
    if isinstance(found, Match):
        continuation = capture_admission_pb2.Continuation(
            parent_call_id=found.parent_call_id,
            prev_token_count=found.prev_len,
            parent_chain_hash=found.chain_hash,
        )
        return capture_admission_pb2.Verdict(continuation=continuation)
    uncaptured = capture_admission_pb2.Uncaptured(
        reason=UNRESOLVED_PARENT,
        detail=_named(str(found.reason), found.candidates, len(found.candidates)),
    )
    return capture_admission_pb2.Verdict(uncaptured=uncaptured)


def judge_forest(
    forest: ForestView, probe: capture_admission_pb2.SourceProbe
) -> capture_admission_pb2.Verdict:
    """Say whom a request of forest mode continues, or that it must not be generated (ADM-2)."""
    match forest.resolve(source_probe_from_proto(probe)):
        case ForestRoot() as found:
            root = capture_admission_pb2.Root(
                reason=_ROOT_REASONS[found.reason],
                nearest_call_id=found.nearest_call_id or "",
                shared_atom_count=found.shared_atom_count,
            )
            return capture_admission_pb2.Verdict(root=root)
        case ForestMatch() as found:
            continuation = capture_admission_pb2.Continuation(
                parent_call_id=found.parent_call_id,
                prev_token_count=found.prev_len,
                parent_chain_hash=found.chain_hash,
                match=(
                    capture_admission_pb2.HISTORY_MATCH_EXACT
                    if found.exact
                    else capture_admission_pb2.HISTORY_MATCH_TOOL_CONTENT_EQUIVALENT
                ),
            )
            return capture_admission_pb2.Verdict(continuation=continuation)
        case AmbiguousHistory() as found:
            what = (
                "the history ends more than one call; echo the ids of the answer's items, or name"
                " the call in a delta request. Candidates"
            )
            return refusals.refused_call(
                er.ERROR_REASON_AMBIGUOUS_HISTORY,
                _named(what, found.candidates, found.candidate_count),
            )
        case ClaimRefused() as found:
            return refusals.refused_call(
                er.ERROR_REASON_HISTORY_CLAIM_REFUSED,
                f"call {found.claimed_call_id} does not end where the request's history does, or"
                " was rendered with other options, or observations alone do not follow it; send"
                " the history whole",
            )


def _resolve(chain: ChainView, probe: capture_admission_pb2.ChainProbe) -> Verdict:
    """Ask the chain; a probe under other fingerprint rules never matches."""
    foreign = probe.fingerprint_version != FINGERPRINT_VERSION
    if foreign and probe.assistant_fingerprint and chain.has_rows():
        return Unresolved(UnresolvedReason.NO_MATCH, ())
    return chain.resolve(
        ChainProbe(probe.assistant_fingerprint, probe.context_digests, probe.item_count)
    )


def _named(what: str, candidates: Sequence[str], count: int) -> str:
    """Say what is wrong, and name the candidates as far as there is room."""
    text = what
    for position, call_id in enumerate(candidates):
        piece = f"{':' if position == 0 else ','} {call_id}"
        rest = f" and {count - position} more"
        if len(text) + len(piece) + len(rest) > DETAIL_MAX:
            return text + rest
        text += piece
    return text if len(candidates) == count else f"{text} and {count - len(candidates)} more"


def mode_name(mode: attempt_pb2.CaptureMode.ValueType) -> str:
    """Name a mode for a person."""
    return attempt_pb2.CaptureMode.Name(mode).removeprefix("CAPTURE_MODE_").lower()
