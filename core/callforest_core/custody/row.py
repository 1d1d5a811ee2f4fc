"""One path as training data, with the records that prove it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.call import CallRecord
from callforest_core.custody.digests import FloatColumn
from callforest_core.custody.tokens import AnyTokenIds

RowFloats: TypeAlias = NDArray[np.float32] | FloatColumn


class Link(NamedTuple):
    """One call of a path.

    Attributes:
        record: its ledger row: identities, digests, chain hash, weight version.
        start: position of its first token in the row.
        carry_len: its new prompt tokens.
        generation_len: its sampled tokens, after the carry.

    """

    record: CallRecord
    start: int
    carry_len: int
    generation_len: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.carry_len + self.generation_len


@dataclass(frozen=True, slots=True, eq=False)
class LinearizedRow:
    """A verified path from a root to an endpoint (capture contract 6.5).

    Attributes:
        capture_key: the attempt.
        token_ids: the whole sequence, shape [tokens].
        token_mask: 1.0 for a sampled token, 0.0 for any other, shape [tokens].
        logprobs: of sampled tokens, 0.0 elsewhere, shape [tokens].
        links: the calls, root first; each has at least one sampled token.

    """

    capture_key: str
    token_ids: AnyTokenIds
    token_mask: RowFloats
    logprobs: RowFloats
    links: tuple[Link, ...]

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The calls, root first."""
        return tuple(link.record.call_id for link in self.links)

    @property
    def prompt_len(self) -> int:
        """Carry of the root call, possibly 0."""
        return self.links[0].carry_len

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """One a call."""
        return tuple(link.record.weight_version for link in self.links)
