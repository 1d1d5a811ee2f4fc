"""What goes into the engine for a call of forest mode that may continue another (ADM-4 to ADM-6).

The ledger says whose history a request has; whether the rendered prompt can begin with that call's
exact tokens is decided here, by the renderings alone. What is proven is spliced, what is not is a
context of its own. Evidence that is missing is an error, never a reason for a fresh root.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np

from callforest_core.custody.errors import CandidateWithoutProofError, SpliceRefusedError
from callforest_core.custody.reasoning import ReasoningReader
from callforest_core.custody.splice import Splice, splice_prefix, turn_ends, turns_of
from callforest_core.custody.tokens import TokenIds, encode_ids

BOUNDARY_NOT_FOUND: Final = "boundary_not_found"
RENDERER_NOT_EQUIVALENT: Final = "renderer_not_equivalent"
UNSUPPORTED_PROMPT: Final = "unsupported_prompt"
TEMPLATE_TRUNCATED_REASONING: Final = "template_truncated_reasoning"
TOOL_CONTENT_EQUIVALENCE: Final = "tool_content_equivalence"

_PROOF_DOMAIN: Final = b"callforest-splice-v1"
_U64: Final = struct.Struct(">Q")


class HistoryMatch(enum.Enum):
    """In which sense a request's history is its predecessor's."""

    UNPROVEN = "unproven"
    EXACT = "exact"
    TOOL_CONTENT_EQUIVALENT = "tool_content_equivalent"


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The call that a request continues, as it was admitted.

    Attributes:
        prefix: all its tokens, prompt and generation, shape [tokens]; at least one.
        chain_hash: of those tokens, 32 bytes.
        match: in which sense the request's history is its own.
    """

    prefix: TokenIds
    chain_hash: bytes
    match: HistoryMatch


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """What the renderer made of a request.

    Attributes:
        prompt: the whole conversation with the generation prompt, shape [tokens].
        history: the conversation up to the last model turn, without generation prompt; None when
            the conversation has none.
        spellings: the history with every answer that has no text spelling that in
            one of the three ways; None where the renderer refuses. Read only where it is needed.
        is_token_list: the engine takes the prompt as tokens, without ranges that would have to
            move with a splice.
    """

    prompt: TokenIds
    history: TokenIds | None
    spellings: tuple[TokenIds | None, ...] = ()
    is_token_list: bool = True


@dataclass(frozen=True, slots=True)
class CaptureDecision:
    """What became of a candidate.

    Attributes:
        is_spliced: its tokens head the prompt; else the rendering is used as it is.
        reason: why they do not, of docs/protocol.md, section "Fresh roots"; "" otherwise.
        prefix_cut: number of captured tokens before the part that was rendered.
        render_cut: where that part begins in the rendering.
        proof: docs/protocol.md, section "Splice proof", 32 bytes; empty when not spliced.
        notes: what else was seen.
    """

    is_spliced: bool
    reason: str = ""
    prefix_cut: int = 0
    render_cut: int = 0
    proof: bytes = b""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CaptureInput:
    """The prompt for the engine, and how it came about."""

    token_ids: TokenIds
    decision: CaptureDecision


def require_proof(match: HistoryMatch) -> None:
    """Refuse a candidate that does not say in which sense the histories match (ADM-4).

    Raises:
        CandidateWithoutProofError: it does not.
    """
    if match is HistoryMatch.UNPROVEN:
        raise CandidateWithoutProofError


def decide_capture_input(
    candidate: Candidate,
    rendering: Rendering,
    terminators: AbstractSet[int],
    reader: ReasoningReader,
) -> CaptureInput:
    """Decide whether the candidate's tokens can head the prompt, and put them there.

    Args:
        candidate: the call that the request continues.
        rendering: what the renderer made of the request.
        terminators: ids that end a turn: the generation configuration's and the tokenizer's.
        reader: finds reasoning in turns.

    Raises:
        CandidateWithoutProofError: the candidate is without proof; nothing may be generated.
        ValueError: the candidate has no token.
    """
    require_proof(candidate.match)
    if not len(candidate.prefix):
        raise ValueError("a candidate has at least one token")
    notes: list[str] = []
    try:
        splice = _splice(candidate, rendering, terminators, reader, notes)
    except SpliceRefusedError as refusal:
        decision = CaptureDecision(is_spliced=False, reason=refusal.reason, notes=tuple(notes))
        return CaptureInput(rendering.prompt, decision)
    assert rendering.history is not None
    decision = CaptureDecision(
        is_spliced=True,
        prefix_cut=splice.prefix_cut,
        render_cut=splice.render_cut,
        proof=splice_proof(splice, rendering.history, terminators, candidate.chain_hash),
        notes=tuple(notes),
    )
    return CaptureInput(splice.token_ids, decision)


def splice_proof(
    splice: Splice, history: TokenIds, terminators: AbstractSet[int], chain_hash: bytes
) -> bytes:
    """Hash what a boundary was proven by: docs/protocol.md, section "Splice proof"."""
    ends = np.array(sorted(terminators), np.uint32)
    digest = hashlib.sha256(_PROOF_DOMAIN)
    digest.update(_U64.pack(splice.prefix_cut) + _U64.pack(splice.render_cut))
    for column in (history, ends):
        digest.update(_U64.pack(len(column)))
        digest.update(encode_ids(column))
    digest.update(chain_hash)
    return digest.digest()


def _splice(
    candidate: Candidate,
    rendering: Rendering,
    terminators: AbstractSet[int],
    reader: ReasoningReader,
    notes: list[str],
) -> Splice:
    """Splice, noting what is seen on the way.

    Raises:
        SpliceRefusedError: a fresh root, with its reason.
    """
    if not rendering.is_token_list:
        raise SpliceRefusedError(UNSUPPORTED_PROMPT, "the prompt is no token list")
    if _leaves_reasoning_out(candidate.prefix, rendering.prompt, terminators, reader):
        notes.append(TEMPLATE_TRUNCATED_REASONING)
    if rendering.history is None:
        raise SpliceRefusedError(BOUNDARY_NOT_FOUND, "the conversation has no model turn")
    if candidate.match is HistoryMatch.TOOL_CONTENT_EQUIVALENT:
        if not _spells_alike(rendering.history, rendering.spellings):
            raise SpliceRefusedError(RENDERER_NOT_EQUIVALENT, "missing text renders differently")
        notes.append(TOOL_CONTENT_EQUIVALENCE)
    return splice_prefix(
        candidate.prefix,
        rendering.prompt,
        rendering.history,
        terminators,
        says_the_same=reader.says_the_same,
    )


def _spells_alike(history: TokenIds, spellings: tuple[TokenIds | None, ...]) -> bool:
    """Say whether every spelling was rendered, and gave the tokens of the request's own."""
    return bool(spellings) and all(
        spelling is not None and np.array_equal(spelling, history) for spelling in spellings
    )


def _leaves_reasoning_out(
    captured: TokenIds, rendered: TokenIds, terminators: AbstractSet[int], reader: ReasoningReader
) -> bool:
    """Say whether some turn's rendering lacks reasoning that was captured.

    Turn by turn, since text of a later turn must not stand for that of an earlier one; equal turns
    need not be read. Where the turns do not pair, the texts are compared whole.
    """
    captured_ends, rendered_ends = (
        turn_ends(captured, terminators),
        turn_ends(rendered, terminators),
    )
    captured_turns, rendered_turns = (
        turns_of(captured, captured_ends),
        turns_of(rendered, rendered_ends),
    )
    rest = captured[sum(map(len, captured_turns)) :]
    if len(rest):  # the last turn was cut; its end stands for the template's
        captured_turns.append(np.append(rest, rest[-1]))
    if len(rendered_turns) < len(captured_turns):
        return reader.is_left_out(captured, rendered)
    return any(
        not np.array_equal(one, other) and reader.is_left_out(one[:-1], other[:-1])
        for one, other in zip(captured_turns, rendered_turns, strict=False)
    )
