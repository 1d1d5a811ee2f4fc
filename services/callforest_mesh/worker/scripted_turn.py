"""The turns of the scripted engine: as a script gives them, made up, and ended by a stop string."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from callforest_mesh.worker.engine import Logprobs, TokenIds

_LOGPROB_STEP: Final = np.float32(3.0 / 2**32)


@dataclass(frozen=True, slots=True, eq=False)
class ScriptedTurn:
    """One answer of a script.

    Attributes:
        token_ids: what is sampled, a terminator included if one is.
        logprobs: one a token, unless the script plays an engine that lost count.
        finish_reason: as served.
        reported_count: the engine's own count of sampled tokens; None for the true one.
        message: the served message's fields beside its role; None for the decoded text.
        text_ends_early: the message leaves out text of the last tokens.
    """

    token_ids: Sequence[int] | TokenIds
    logprobs: Sequence[float] | Logprobs
    finish_reason: str = "stop"
    reported_count: int | None = None
    message: Mapping[str, object] | None = None
    text_ends_early: bool = False


def pseudo_random_turn(
    prompt: TokenIds,
    seed: str,
    *,
    limit: int,
    sizes: tuple[int, int],
    letters: TokenIds,
    terminator: int,
) -> ScriptedTurn:
    """Make a turn that depends on the prompt and the seed alone.

    Args:
        prompt: the prompt's ids.
        seed: sets turns of one prompt apart.
        limit: most tokens, the terminator included; a turn that is cut has none.
        sizes: fewest and most tokens before the terminator.
        letters: the ids to choose from.
        terminator: ends the turn.
    """
    chance = hashlib.sha256(seed.encode())
    chance.update(prompt.astype("<u4", copy=False).data)
    least, most = sizes
    # Of the hash's output: the turn's size, then a letter and a log-probability for each token.
    drawn = np.frombuffer(hashlib.shake_128(chance.digest()).digest(8 * (most + 2)), "<u4")
    size = least + int(drawn[0]) % (most - least + 1)
    sampled = np.empty(size + 1, np.uint32)
    sampled[:size] = letters[drawn[1 : size + 1] % len(letters)]
    sampled[size] = terminator
    logprobs = -0.01 - drawn[most + 1 : most + 2 + size].astype(np.float32) * _LOGPROB_STEP
    if len(sampled) > limit:
        return ScriptedTurn(sampled[:limit], logprobs[:limit], "length")
    return ScriptedTurn(sampled, logprobs)


def turn_stopped(
    turn: ScriptedTurn, stops: Sequence[str], decode: Callable[[TokenIds], str], *, shown: bool
) -> ScriptedTurn:
    """End a turn where the first stop string is complete, as vLLM does.

    The token that completes it is the last one; the text ends before the stop string, or behind it.

    Args:
        turn: without a message of its own; one that has one is never ended.
        stops: none of them empty.
        decode: gives the text of ids.
        shown: the stop string belongs to the text.
    """
    token_ids = np.asarray(turn.token_ids, np.uint32)

    def is_complete(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(stop in text for stop in stops)

    if not stops or turn.message is not None or not is_complete(len(token_ids)):
        return turn
    count = next(count for count in range(len(token_ids) + 1) if is_complete(count))
    whole = decode(token_ids[:count])
    start, stop = min(
        ((whole.index(stop), stop) for stop in stops if stop in whole),
        key=lambda found: found[0] + len(found[1]),
    )
    text = whole[: start + len(stop)] if shown else whole[:start]
    return replace(
        turn,
        token_ids=token_ids[:count],
        logprobs=turn.logprobs[:count],
        finish_reason="stop",
        message={"content": text},
        text_ends_early=text != whole,
    )
