"""A rollout's training rows from its staged calls, its manifest and a selection (FOR-1 to FOR-7).

Every call of the attempt is verified, selected or not; every selected generated token has loss in
exactly one row; ancestors that rows share are exact context in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.call import Receipt
from callforest_core.custody.columns import AnyCall
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import verify_paths
from callforest_core.forest.paths import SelectedPath, check_selection, selected_paths


@dataclass(frozen=True, slots=True, eq=False)
class ForestRow:
    """One path as training data.

    Attributes:
        line: the verified path: tokens, logprobs, calls.
        first_owned: calls from this index on have loss in this row; at least the last one.
    """

    line: LinearizedRow
    first_owned: int

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Whether each token has loss here; shape [tokens]."""
        mask = np.asarray(self.line.token_mask != 0.0)
        mask[: self.line.links[self.first_owned].start] = False
        return mask


@dataclass(frozen=True, slots=True)
class ForestMetrics:
    """Lengths of one logical rollout, each generation counted once (FOR-7).

    Attributes:
        gen_tokens_per_sample: sampled tokens that have loss.
        max_gen_tokens_per_turn: of the longest generation.
        total_tokens_per_sample: of the longest verified context.
    """

    gen_tokens_per_sample: int
    max_gen_tokens_per_turn: int
    total_tokens_per_sample: int


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """A rollout as training data.

    Attributes:
        rows: in row order.
        metrics: over all rows.
    """

    rows: tuple[ForestRow, ...]
    metrics: ForestMetrics


def reconstruct(receipt: Receipt, calls: Sequence[AnyCall], selection: Sequence[str]) -> Forest:
    """Verify an attempt and build the rows of its selected calls.

    Args:
        receipt: of the attempt; its terminal call is the scored one.
        calls: one a manifest row, in manifest order.
        selection: the calls that train, in priority order.

    Raises:
        SelectionError: the selection cannot be reconstructed.
        VerificationError: with the code of the first check that fails.
    """
    parents = {record.call_id: record.parent_call_id for record in receipt.manifest}
    check_selection(parents, selection, receipt.terminal_call_id or "")
    paths = selected_paths(parents, selection)
    lines = verify_paths(receipt, calls, [path.call_ids[-1] for path in paths])
    rows = tuple(ForestRow(line, path.first_owned) for line, path in zip(lines, paths, strict=True))
    return Forest(rows, _measure(lines, paths))


def _measure(lines: Sequence[LinearizedRow], paths: Sequence[SelectedPath]) -> ForestMetrics:
    generations = [
        link.generation_len
        for line, path in zip(lines, paths, strict=True)
        for link in line.links[path.first_owned :]
    ]
    return ForestMetrics(
        gen_tokens_per_sample=sum(generations),
        max_gen_tokens_per_turn=max(generations),
        total_tokens_per_sample=max(len(line.token_ids) for line in lines),
    )
