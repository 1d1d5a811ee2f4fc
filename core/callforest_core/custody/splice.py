"""Splice captured tokens in place of a re-rendered history (ADM-6).

A chat template re-renders the history as text that may tokenise otherwise, or without reasoning.
The captured tokens replace it up to the end of the last model turn, found by counting terminators.
A count alone proves no boundary, so every turn is compared as well; what is not proven is refused.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.errors import SpliceRefusedError
from callforest_core.custody.tokens import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """A prompt that begins with captured tokens.

    Attributes:
        token_ids: `prefix[:prefix_cut]`, then `rendered[render_cut:]`; begins with all of prefix.
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
) -> Splice:
    """Put the captured prefix in place of the history in a rendered prompt.

    The terminator at the boundary is the template's, unless sampled: then the template's must be
    the same token, so that it appears once and the prefix stays whole.

    Args:
        prefix: captured tokens of the parent's path, prompt and generation.
        rendered: template render of the whole request, generation prompt included.
        history_render: template render up to and with the last model turn, no generation prompt.
        terminators: ids that end a turn: the generation configuration's and the tokenizer's.

    Raises:
        SpliceRefusedError: reason `no_terminators`, `boundary_not_found`, `turn_count_differs`,
            `terminator_differs`, `turn_differs` or `nothing_follows`.

    """
    if not len(prefix):
        return Splice(rendered, 0, 0)
    if not terminators:
        raise SpliceRefusedError("no_terminators", "no token is known to end a turn")
    history_ends = _ends(history_render, terminators)
    rendered_ends = _ends(rendered, terminators)
    turns = len(history_ends)
    if turns == 0 or len(rendered_ends) < turns:
        raise SpliceRefusedError(
            "boundary_not_found", f"{turns} turns end in the history, {len(rendered_ends)} in all"
        )
    cut = len(prefix) - 1 if int(prefix[-1]) in terminators else len(prefix)
    captured = len(_ends(prefix[:cut], terminators)) + 1
    if captured != turns:
        raise SpliceRefusedError("turn_count_differs", f"captured {captured}, rendered {turns}")
    boundary = int(rendered_ends[turns - 1])
    if cut < len(prefix) and rendered[boundary] != prefix[cut]:
        raise SpliceRefusedError(
            "terminator_differs", f"captured {prefix[cut]}, rendered {rendered[boundary]}"
        )
    if boundary + 1 == len(rendered):
        raise SpliceRefusedError("nothing_follows", "the render ends with the history")
    _check_turns(history_render, history_ends, rendered, rendered_ends[:turns])
    return Splice(np.concatenate((prefix[:cut], rendered[boundary:])), cut, boundary)


def _ends(token_ids: TokenIds, terminators: AbstractSet[int]) -> NDArray[np.intp]:
    """Positions of the terminators."""
    if len(terminators) == 1:  # the usual case; isin takes several times as long
        (known,) = terminators
        is_end = token_ids == known
    else:
        is_end = np.isin(token_ids, np.fromiter(terminators, dtype=np.int64))
    positions: NDArray[np.intp] = is_end.nonzero()[0]  # flatnonzero is two calls more
    return positions


def _check_turns(
    history: TokenIds,
    history_ends: NDArray[np.intp],
    rendered: TokenIds,
    rendered_ends: NDArray[np.intp],
) -> None:
    """Check that the render has the turns of the history, whole or with a part left out.

    Templates leave reasoning out of earlier model turns, so a turn may miss one contiguous range. A
    turn that was dropped or added makes its neighbours differ in more than that.
    """
    if np.array_equal(history[: history_ends[-1] + 1], rendered[: rendered_ends[-1] + 1]):
        return
    history_start = rendered_start = 0
    for turn, (history_end, rendered_end) in enumerate(
        zip(history_ends, rendered_ends, strict=True)
    ):
        whole = history[history_start : history_end + 1]
        part = rendered[rendered_start : rendered_end + 1]
        if not _is_whole_or_cut(whole, part):
            raise SpliceRefusedError(
                "turn_differs", f"turn {turn} at token {rendered_start} is not the history's"
            )
        history_start, rendered_start = history_end + 1, rendered_end + 1


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
