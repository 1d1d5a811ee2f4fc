"""The layout of a group: which rows it has, what they are made of, who owns which loss.

Fixed before publication (FIN-2), a pure function of the group's receipts. Rows refer to segments;
every segment stands once. The first row that contains a segment owns its loss (FOR-3).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from callforest_core.forest.padding import padding_count


class RowPurpose(enum.Enum):
    """What a row is for."""

    TRAINING = enum.auto()
    """Its owned generations have loss."""
    PLACEHOLDER = enum.auto()
    """Stands for a masked rollout, on a borrowed layout, without loss (FIN-4)."""
    PADDING = enum.auto()
    """Fills the group to the row multiple, on a borrowed layout, without loss or owner."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One staged call as a part of rows.

    Attributes:
        capture_key: the attempt.
        call_id: the call.
        digest: the staged call's digest, 32 bytes.
    """

    capture_key: str
    call_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one logical rollout brings to its group.

    Attributes:
        slot: the rollout's place in the group, from 0.
        paths: its verified paths, each from root to endpoint, in order; none when it is masked.
    """

    slot: int
    paths: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A segment's place in a row.

    Attributes:
        segment: index into the layout's segments.
        owns_loss: whether this row trains the segment's generation.
    """

    segment: int
    owns_loss: bool


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row.

    Attributes:
        row_id: its canonical id.
        slot: the owning rollout's slot; None for padding.
        spans: its segments from root to endpoint.
        purpose: what it is for.
    """

    row_id: str
    slot: int | None
    spans: tuple[Span, ...]
    purpose: RowPurpose


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """All rows of a group.

    Attributes:
        segments: the unique segments, in order of first use.
        rows: by slot, then by place within the slot; padding last. Empty when no rollout of the
            group is valid: then the group has no layout and is dropped (FIN-4).
        row_multiple: what the number of rows is a multiple of.
    """

    segments: tuple[Segment, ...]
    rows: tuple[RowLayout, ...]
    row_multiple: int


def lay_out_group(
    group_id: str, contributions: Sequence[Contribution], row_multiple: int
) -> GroupLayout:
    """Lay out a group.

    Args:
        group_id: begins every row id.
        contributions: one a logical rollout, in slot order from 0.
        row_multiple: the number of rows becomes a multiple of it.

    Raises:
        ValueError: slots are not 0, 1, 2, ..., a path is empty or visits a call twice, or two
            rollouts bring the same call: its loss would have two owners.
    """
    if [one.slot for one in contributions] != list(range(len(contributions))):
        raise ValueError(f"slots of group {group_id} are not 0 to {len(contributions) - 1}")
    _check_owners(group_id, contributions)
    places: dict[Segment, int] = {}
    rows: list[RowLayout] = []
    lender = _lender(contributions, places)
    if lender is None:
        return GroupLayout((), (), row_multiple)
    for one in contributions:
        if not one.paths:
            row_id = f"{group_id}_g{one.slot}_s0"
            rows.append(RowLayout(row_id, one.slot, lender, RowPurpose.PLACEHOLDER))
        owned: set[Segment] = set()
        for ordinal, path in enumerate(one.paths):
            row_id = f"{group_id}_g{one.slot}_s{ordinal}"
            spans = _owning_spans(path, places, owned)
            rows.append(RowLayout(row_id, one.slot, spans, RowPurpose.TRAINING))
    rows.extend(
        RowLayout(f"{group_id}_pad{number}", None, lender, RowPurpose.PADDING)
        for number in range(padding_count(len(rows), row_multiple))
    )
    return GroupLayout(tuple(places), tuple(rows), row_multiple)


def _check_owners(group_id: str, contributions: Sequence[Contribution]) -> None:
    owners: dict[Segment, int] = {}
    for one in contributions:
        for path in one.paths:
            if not path or len(set(path)) != len(path):
                raise ValueError(f"a path of group {group_id} is empty or visits a call twice")
            for part in path:
                if owners.setdefault(part, one.slot) != one.slot:
                    raise ValueError(f"two rollouts of group {group_id} have call {part.call_id}")


def _lender(
    contributions: Sequence[Contribution], places: dict[Segment, int]
) -> tuple[Span, ...] | None:
    """Give the layout that masked rollouts and padding borrow: the first valid row's."""
    path = next((one.paths[0] for one in contributions if one.paths), None)
    if path is None:
        return None
    return tuple(Span(places.setdefault(part, len(places)), owns_loss=False) for part in path)


def _owning_spans(
    path: tuple[Segment, ...], places: dict[Segment, int], owned: set[Segment]
) -> tuple[Span, ...]:
    """Place a path's segments; it owns those that no earlier row of the rollout has."""
    spans = []
    for part in path:
        index = places.setdefault(part, len(places))
        spans.append(Span(index, owns_loss=part not in owned))
        owned.add(part)
    return tuple(spans)
