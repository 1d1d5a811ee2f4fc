"""Splice captured tokens in place of a re-rendered history (ADM-6).

A chat template re-renders the history as text that may tokenise otherwise, or without reasoning.
The captured tokens replace it up to the end of the last model turn, found by counting terminators.
A count alone proves no boundary, so every turn is compared as well; what is not proven is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.errors import SpliceRefusedError
from callforest_core.custody.tokens import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """A prompt that begins with captured tokens.

    Attributes:
        token_ids: `prefix[:prefix_cut]`, then `rendered[render_cut:]`; begins with all of prefix.
            Where that is what was rendered, it is that very array.
        prefix_cut: end of the part that came from the prefix. Media ranges before it keep their
            offset.
        render_cut: start of the part that came from the render. Media ranges from it on shift by
            `prefix_cut - render_cut`.

    """

    token_ids: TokenIds
    prefix_cut: int
    render_cut: int


def splice_prefix(
    prefix: TokenIds,
    rendered: TokenIds,
    history_render: TokenIds,
    terminators: AbstractSet[int],
    *,
    says_the_same: Callable[[TokenIds, TokenIds], bool] | None = None,
) -> Splice:
    """Put the captured prefix in place of the history in a rendered prompt.

    The terminator at the boundary is the template's, unless sampled: then the template's must be
    the same token, so that it appears once and the prefix stays whole.

    Args:
        prefix: captured tokens of the parent's path, prompt and generation.
        rendered: template render of the whole request, generation prompt included.
        history_render: template render up to and with the last model turn, no generation prompt.
        terminators: ids that end a turn: the generation configuration's and the tokenizer's.
        says_the_same: judges a turn of the history and the same turn of the render, which misses
            one range of it: whether that range may be missing. None lets any range be missing.

    Raises:
        SpliceRefusedError: reason `no_terminators`, `boundary_not_found`, `turn_count_differs`,
            `terminator_differs`, `turn_differs` or `nothing_follows`.

    """
    if not len(prefix):
        return Splice(rendered, 0, 0)
    if not terminators:
        raise SpliceRefusedError("no_terminators", "no token is known to end a turn")
    cut = len(prefix) - 1 if int(prefix[-1]) in terminators else len(prefix)
    rendered_ends, rendered_bytes = turn_ends(rendered, terminators), rendered.tobytes()
    captured_ends, prefix_renders = _ends_beside(
        rendered_bytes, rendered_ends, prefix[:cut], terminators
    )
    captured, history = len(captured_ends) + 1, history_render
    history_ends, history_renders = _ends_beside(
        rendered_bytes, rendered_ends, history, terminators
    )
    if captured == len(history_ends) + 1 <= len(rendered_ends):
        history, history_ends = _closed(history, history_ends, rendered, rendered_ends)
    turns = len(history_ends)
    if turns == 0 or len(rendered_ends) < turns:
        raise SpliceRefusedError(
            "boundary_not_found", f"{turns} turns end in the history, {len(rendered_ends)} in all"
        )
    if captured != turns:
        raise SpliceRefusedError("turn_count_differs", f"captured {captured}, rendered {turns}")
    boundary = int(rendered_ends[turns - 1])
    if cut < len(prefix) and rendered[boundary] != prefix[cut]:
        raise SpliceRefusedError(
            "terminator_differs", f"captured {prefix[cut]}, rendered {rendered[boundary]}"
        )
    if boundary + 1 == len(rendered):
        raise SpliceRefusedError("nothing_follows", "the render ends with the history")
    if not history_renders:
        parts = turns_of(rendered, rendered_ends[:turns])
        _check_turns(turns_of(history, history_ends), parts, says_the_same)
    if prefix_renders and cut == boundary:
        return Splice(rendered, cut, boundary)
    return Splice(np.concatenate((prefix[:cut], rendered[boundary:])), cut, boundary)


def turn_ends(token_ids: TokenIds, terminators: AbstractSet[int]) -> NDArray[np.intp]:
    """Give the positions of the terminators."""
    if len(terminators) == 1:  # the usual case; isin takes several times as long
        (known,) = terminators
        is_end = token_ids == known
    else:
        is_end = np.isin(token_ids, np.fromiter(terminators, dtype=np.int64))
    positions: NDArray[np.intp] = is_end.nonzero()[0]  # flatnonzero is two calls more
    return positions


def _ends_beside(
    rendered_bytes: bytes,
    rendered_ends: NDArray[np.intp],
    token_ids: TokenIds,
    terminators: AbstractSet[int],
) -> tuple[NDArray[np.intp], bool]:
    """Give `turn_ends` of tokens, and whether the render begins with them; then it has the same.

    It nearly always does, and comparing bytes costs a fraction of looking for the ends anew.
    """
    if rendered_bytes.startswith(token_ids.data):
        return rendered_ends[: bisect_left(rendered_ends, len(token_ids))], True
    return turn_ends(token_ids, terminators), False


def turns_of(token_ids: TokenIds, ends: NDArray[np.intp]) -> list[TokenIds]:
    """Cut tokens into turns, each with its terminator; what follows the last one is left out."""
    starts = [0, *(ends + 1).tolist()]
    return [token_ids[start:end] for start, end in pairwise(starts)]


def _closed(
    history: TokenIds,
    history_ends: NDArray[np.intp],
    rendered: TokenIds,
    rendered_ends: NDArray[np.intp],
) -> tuple[TokenIds, NDArray[np.intp]]:
    """Give the history with the terminator of its last turn, where its own render lacks that.

    Some templates end a turn only when another follows: by writing the terminator then, or because
    it is the next turn's opening. The whole render has that terminator; what stands before it must
    be what the history ends with, else the history stays as it is.
    """
    turns = len(history_ends)
    tail = history[history_ends[-1] + 1 :] if turns else history
    boundary = int(rendered_ends[turns])
    start = int(rendered_ends[turns - 1]) + 1 if turns else 0
    if not _is_whole_or_cut(tail, rendered[start:boundary]):
        return history, history_ends
    closed = np.append(history, rendered[boundary])
    return closed, np.append(history_ends, len(history))


def _check_turns(
    history: list[TokenIds],
    rendered: list[TokenIds],
    says_the_same: Callable[[TokenIds, TokenIds], bool] | None,
) -> None:
    """Check that the render has the turns of the history, whole or with a part left out.

    Templates leave reasoning out of earlier model turns, so a turn may miss one contiguous range. A
    turn that was dropped or added makes its neighbours differ in more than that.
    """
    for turn, (whole, part) in enumerate(zip(history, rendered, strict=True)):
        if np.array_equal(whole, part):
            continue
        if _is_whole_or_cut(whole, part) and (says_the_same is None or says_the_same(whole, part)):
            continue
        raise SpliceRefusedError("turn_differs", f"turn {turn} of the render is not the history's")


def _is_whole_or_cut(whole: TokenIds, part: TokenIds) -> bool:
    """Whether `part` is `whole` without one contiguous range, its first token kept."""
    size = len(part)
    if size > len(whole) or size == 0:
        return False
    head = whole[:size] == part
    tail = whole[len(whole) - size :] == part
    shared_head = size if head.all() else int(np.argmin(head))
    shared_tail = size if tail.all() else int(np.argmin(tail[::-1]))
    return shared_head >= 1 and shared_head + shared_tail >= size
