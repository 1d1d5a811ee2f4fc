"""What a worker decides about one call: prefix, delta, completion. Pure.

The engine's answer is checked before it becomes a capture; whatever does not hold is a
`CaptureError` with one of the reasons of docs/protocol.md, section "Failure reasons", and the
completion is served all the same (CAP-7).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from callforest.capture.v1 import capture_admission_pb2, completion_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.capture_decision import match_from_proto
from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.capture_input import CaptureDecision, require_proof
from callforest_core.custody.completion import complete_path
from callforest_core.custody.digests import chain_hash
from callforest_core.custody.errors import (
    CandidateWithoutProofError,
    CaptureError,
    CountMismatchError,
)
from callforest_core.custody.extras import ExtrasValue, encode_extras
from callforest_core.custody.path import EMPTY_PATH, TokenPath
from callforest_core.custody.tokens import TokenIds
from callforest_core.refusal import Refusal
from callforest_mesh.worker.engine import EngineResult, PrefixEvidence

PREFIX_UNAVAILABLE: Final = "prefix_unavailable"
PREFIX_MISMATCH: Final = "prefix_mismatch"
EMPTY_GENERATION: Final = "empty_generation"
TEXT_ENDS_EARLY: Final = "text_ends_early"
STAGE_FAILED: Final = "stage_failed"
STAGE_TIMEOUT: Final = "stage_timeout"

_ENDED: Final = frozenset({"stop", "tool_calls", "function_call"})
_DETAIL_MAX: Final = 1024
_ENCODED_MAX: Final = 256
_ENCODED: Final[dict[tuple[str, str], bytes]] = {}


class PrefixUnavailableError(CaptureError):
    """The predecessor's tokens could not be had, or are not those that the ledger recorded."""

    def __init__(self, detail: str) -> None:
        super().__init__(PREFIX_UNAVAILABLE, detail)


class PrefixRefusedError(CaptureError):
    """The engine could not prove where the captured prefix ends in the rendered prompt."""

    def __init__(self, detail: str) -> None:
        super().__init__(PREFIX_MISMATCH, detail)


class EmptyGenerationError(CaptureError):
    """The engine sampled no token."""

    def __init__(self) -> None:
        super().__init__(EMPTY_GENERATION, "the engine sampled no token")


class TextEndsEarlyError(CaptureError):
    """The served text ends before the sampled tokens do.

    The harness's history would name tokens whose text it never saw.
    """

    def __init__(self) -> None:
        super().__init__(
            TEXT_ENDS_EARLY,
            "a stop string or token ended the generation, and its text was not served",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """All tokens of a call, from the root to its end.

    Attributes:
        path: the tokens with their encoding; sequences that continue each other share its memory.
        chain_hash: of the deltas that they were built from, 32 bytes.
    """

    path: TokenPath
    chain_hash: bytes

    @property
    def token_ids(self) -> TokenIds:
        """The tokens, shape [tokens], not copied."""
        return self.path.token_ids


def admitted(sequence: Sequence, continuation: capture_admission_pb2.Continuation) -> bool:
    """Say whether a sequence is the admitted predecessor's: its length and its chain hash."""
    return (
        len(sequence.path) == continuation.prev_token_count
        and sequence.chain_hash == continuation.parent_chain_hash
    )


def continues(admission: capture_admission_pb2.CaptureAdmission) -> bool:
    """Say whether the call was admitted behind a predecessor."""
    return admission.WhichOneof("position") == "continuation"


def evidence_of(admission: capture_admission_pb2.CaptureAdmission) -> PrefixEvidence | None:
    """Give what is known of the predecessor in forest mode; None in chain mode and for a root.

    Raises:
        Refusal: CANDIDATE_WITHOUT_PROOF; nothing may be generated (ADM-4).
    """
    if not (admission.is_forest and continues(admission)):
        return None
    match = match_from_proto(admission.continuation.match)
    try:
        require_proof(match)
    except CandidateWithoutProofError as error:
        raise Refusal(
            er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF,
            "the continuation does not say in which sense the histories match; admission and "
            "worker must be of paired releases",
            capture_key=admission.capture_key,
            call_id=admission.call_id,
        ) from error
    return PrefixEvidence(match, admission.continuation.parent_chain_hash)


def require_configuration(capture_key: str, expected: bytes, actual: bytes) -> None:
    """Refuse a call whose attempt is bound to another configuration than the engine's (CAP-11).

    Args:
        capture_key: names the attempt.
        expected: the digest that the attempt is bound to; empty when it is not.
        actual: the engine's.

    Raises:
        Refusal: CONFIGURATION_CHANGED; nothing may be generated.
    """
    if expected and expected != actual:
        raise Refusal(
            er.ERROR_REASON_CONFIGURATION_CHANGED,
            "model, template or processor are not those with which the attempt began; open another",
            capture_key=capture_key,
            expected=expected.hex(),
            actual=actual.hex(),
        )


def decision_of(
    admission: capture_admission_pb2.CaptureAdmission, made: CaptureDecision | None
) -> CaptureDecision | None:
    """Give the decision to report of a call.

    Args:
        admission: what may be captured of it.
        made: the engine's decision; None when it had none to make.

    Returns:
        A root's own in forest mode; None in chain mode, and for a continuation whose prefix did not
        reach the engine.
    """
    if not admission.is_forest:
        return None
    return made if continues(admission) else CaptureDecision(is_spliced=False)


def extend(base: Sequence | None, deltas: Iterable[TokenIds]) -> Sequence:
    """Put deltas behind a sequence (or at a root), hashing each onto the chain.

    Raises:
        PrefixUnavailableError: there is neither a base nor a delta.
    """
    hashed = None if base is None else base.chain_hash
    path = EMPTY_PATH if base is None else base.path
    added = list(deltas)
    for delta in added:
        hashed = chain_hash(hashed, delta)
    if hashed is None:
        raise PrefixUnavailableError("the store gave no tokens")
    return Sequence(path.extended(np.concatenate(added)) if added else path, hashed)


def capture(
    admission: capture_admission_pb2.CaptureAdmission,
    prefix: Sequence | None,
    result: EngineResult,
) -> tuple[StagedCall, Sequence]:
    """Check what the engine says; build the call to stage, and the sequence that it ends.

    Args:
        admission: what may be captured.
        prefix: the predecessor's tokens as the engine got them; None for a root.
        result: the engine's answer.

    Raises:
        CaptureError: the call cannot be captured; `reason` says why.
    """
    sampled = len(result.generated_ids)
    if result.reported_completion_tokens != sampled:
        raise CountMismatchError(sampled, result.reported_completion_tokens, "the engine")
    if len(result.logprobs) != sampled:
        raise CountMismatchError(sampled, len(result.logprobs), "logprobs")
    if not sampled:
        raise EmptyGenerationError
    if result.text_ends_early:
        raise TextEndsEarlyError
    if result.prefix_refused:
        raise PrefixRefusedError(result.prefix_refused)
    inherits = continues(admission)
    if _is_fresh_root(admission, result):
        prefix, inherits = None, False
    parent = admission.continuation.parent_call_id if inherits else None
    owner = admission.continuation.parent_capture_key if inherits else ""
    staged, path = complete_path(
        CallIdentity(admission.capture_key, admission.call_id, parent, owner),
        prefix=prefix.path if prefix else None,
        parent_chain_hash=prefix.chain_hash if prefix else None,
        prompt_ids=result.prompt_ids,
        generated_ids=result.generated_ids,
        logprobs=result.logprobs,
        weight_version=result.weight_version,
        extras=_extras_of(result),
        reported_generation_len=result.reported_completion_tokens,
    )
    return staged, Sequence(path, staged.chain_hash)


def _is_fresh_root(admission: capture_admission_pb2.CaptureAdmission, result: EngineResult) -> bool:
    """Say whether an admitted continuation became a context of its own.

    Raises:
        PrefixRefusedError: the engine left open what became of the prefix.
    """
    if evidence_of(admission) is None:
        return False
    if result.decision is None:
        raise PrefixRefusedError("the engine did not say what became of the prefix")
    return not result.decision.is_spliced


def completion_of(result: EngineResult) -> completion_pb2.Completion:
    """Say how a generation ended.

    A finish reason that is not known to end a turn counts as a cut: an unknown one must not pass
    for a finished turn.
    """
    ended = result.finish_reason in _ENDED
    return completion_pb2.Completion(
        status=(
            completion_pb2.COMPLETION_STATUS_COMPLETED
            if ended
            else completion_pb2.COMPLETION_STATUS_INCOMPLETE
        ),
        finish_reason=result.finish_reason[:64],
        generation_token_count=len(result.generated_ids),
        weight_version_count=weight_version_count(result),
    )


def weight_version_count(result: EngineResult) -> int:
    """Count the weight versions that sampled a part of the generation."""
    spans = result.weight_version_spans
    if len(spans) == 1 and spans[0].version == result.weight_version:
        return 1
    return len({span.version for span in spans} | {result.weight_version})


def shortened(detail: str) -> str:
    """Cut a detail to what a failure row may hold; half a surrogate pair has no UTF-8 form."""
    return detail[:_DETAIL_MAX].encode("utf-8", "replace").decode()


def _extras_of(result: EngineResult) -> bytes:
    """Encode what is kept of a call beside its columns.

    Most calls have the same extras, and the text of their values tells all of them apart.
    """
    if weight_version_count(result) > 1:
        return encode_extras(_extras(result))
    text = result.logprobs_mode, repr(result.sampling)
    encoded = _ENCODED.get(text)
    if encoded is None:
        encoded = encode_extras(_extras(result))
        if len(_ENCODED) == _ENCODED_MAX:
            _ENCODED.clear()
        _ENCODED[text] = encoded
    return encoded


def _extras(result: EngineResult) -> dict[str, ExtrasValue]:
    extras: dict[str, ExtrasValue] = {
        "sampling": dict(result.sampling),
        "logprobs_mode": result.logprobs_mode,
    }
    if weight_version_count(result) > 1:
        extras["weight_version_spans"] = [
            [span.start, span.end, span.version] for span in result.weight_version_spans
        ]
    return extras
