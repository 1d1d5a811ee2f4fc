"""What a request continues, as the verdict that its caller gets. Pure.

Chain mode finds a call by what models wrote and never makes a root of what it cannot resolve.
Forest mode finds it by its whole history, makes a root of what it does not know, and refuses what
it cannot tell apart.
"""

from __future__ import annotations

from typing import Final, TypeVar

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.ledger.v1 import ledger_service_pb2
from callforest_client.capture_mode import mode_name
from callforest_client.source_codec import source_probe_from_proto
from callforest_core.lineage.chain import (
    ChainProbe,
    ChainRecord,
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

RecordT = TypeVar("RecordT", bound=ChainRecord)

UNRESOLVED_PARENT: Final = "unresolved_parent"
"""Failure reason of a call without a predecessor, or with more than one."""

_PROBE_MODES: Final = {
    "chain": attempt_pb2.CAPTURE_MODE_CHAIN,
    "source": attempt_pb2.CAPTURE_MODE_FOREST,
}
_ROOT_REASONS: Final = {
    RootReason.NO_MODEL_ITEMS: capture_admission_pb2.ROOT_REASON_NO_MODEL_ITEMS,
    RootReason.UNREADABLE_ITEM: capture_admission_pb2.ROOT_REASON_UNREADABLE_ITEM,
    RootReason.HISTORY_NOT_RECORDED: capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED,
    RootReason.RENDER_OPTIONS_CHANGED: capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED,
    RootReason.NOT_OBSERVATIONS: capture_admission_pb2.ROOT_REASON_NOT_OBSERVATIONS,
}


def judge(
    view: AttemptView,
    asked: attempt_pb2.CallIntent | ledger_service_pb2.FindPredecessorRequest,
) -> capture_admission_pb2.Verdict:
    """Say whom a call would continue now, of an attempt that takes calls.

    Raises:
        Refusal: INVALID_MESSAGE, a call of forest mode without a configuration.
    """
    which = asked.WhichOneof("probe")
    mode = attempt_pb2.CAPTURE_MODE_UNSPECIFIED if which is None else _PROBE_MODES[which]
    if mode != view.mode:
        opened, other = mode_name(view.mode), mode_name(mode)
        return refusals.refused_call(
            refusals.foreign_mode(asked.capture_key, opened=opened, asked=other)
        )
    bound, stated = view.configuration_digest, asked.configuration_digest
    if view.forest is not None and not stated:
        raise refusals.configuration_missing(asked.DESCRIPTOR.full_name)
    if bound and stated and bound != stated:
        return refusals.refused_call(
            refusals.configuration_changed(asked.capture_key, bound=bound, stated=stated)
        )
    if view.forest is None:
        verdict = judge_chain(view.chain, asked.chain)
    else:
        call_id = asked.call_id if isinstance(asked, attempt_pb2.CallIntent) else ""
        verdict = judge_forest(
            view.forest, asked.source, capture_key=asked.capture_key, call_id=call_id
        )
    if verdict.WhichOneof("verdict") == "continuation":
        parent = verdict.continuation.parent_call_id
        verdict.continuation.parent_capture_key = view.source_of(parent)
    return verdict


def judge_chain(
    chain: ChainView[RecordT], probe: capture_admission_pb2.ChainProbe
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
        detail=refusals.named(str(found.reason), found.candidates, len(found.candidates)),
    )
    return capture_admission_pb2.Verdict(uncaptured=uncaptured)


def judge_forest(
    forest: ForestView,
    probe: capture_admission_pb2.SourceProbe,
    *,
    capture_key: str,
    call_id: str,
) -> capture_admission_pb2.Verdict:
    """Say whom a request of forest mode continues, or that it must not be generated (ADM-2).

    Args:
        forest: the committed calls.
        probe: of the request.
        capture_key: names the attempt.
        call_id: names the call, or "" when there will be none.
    """
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
            return refusals.refused_call(
                refusals.ambiguous_history(
                    capture_key, call_id, found.candidates, found.candidate_count
                )
            )
        case ClaimRefused() as found:
            return refusals.refused_call(
                refusals.claim_refused(
                    capture_key,
                    call_id,
                    claimed_call_id=found.claimed_call_id,
                    fault=found.fault,
                )
            )


def _resolve(chain: ChainView[RecordT], probe: capture_admission_pb2.ChainProbe) -> Verdict:
    """Ask the chain; a probe under other fingerprint rules never matches."""
    foreign = probe.fingerprint_version != FINGERPRINT_VERSION
    if foreign and probe.assistant_fingerprint and chain.has_rows():
        return Unresolved(UnresolvedReason.NO_MATCH, ())
    return chain.resolve(
        ChainProbe(probe.assistant_fingerprint, probe.context_digests, probe.item_count)
    )
