"""The rows that a receipt makes of an attempt, for people: which calls, and who owns which loss."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from callforest.capture.v1 import call_record_pb2, receipt_pb2
from callforest_client.ledger import Manifest
from callforest_core.forest.paths import SelectedPath, selected_paths
from callforest_mesh.attempt_report import selected_calls

_SHOWN_CALLS = 12
_STRIP = 22
_GAP = 10
_LABEL = 64
_CALL_LEAST = 18.0
_CALL_MOST = 160.0
_TOKENS_WIDEST = 1024


def rows_of(manifest: Manifest, receipt: receipt_pb2.Receipt | None) -> tuple[SelectedPath, ...]:
    """Give the rows of a finalized attempt in their order; none when it is masked."""
    chosen = selected_calls(receipt)
    if receipt is None or receipt.capture_key != manifest.attempt.capture_key or not chosen:
        return ()
    parents = {
        record.coords.call_id: record.coords.parent_call_id or None for record in manifest.records
    }
    # A receipt of chain mode has no order of its own; its calls are one path.
    ordered = receipt.selected_call_ids or [one for one in parents if one in chosen]
    return selected_paths(parents, list(ordered))


def row_lines(rows: Sequence[SelectedPath]) -> list[str]:
    """Describe rows: context in brackets, then the calls whose loss the row owns."""
    lines = []
    for number, row in enumerate(rows):
        context, owned = row.call_ids[: row.first_owned], row.call_ids[row.first_owned :]
        shared = f"[{_joined(context)}] " if context else ""
        lines.append(f"row {number}  {shared}{_joined(owned)}")
    return lines


def draw_rows(
    rows: Sequence[SelectedPath],
    records: Sequence[call_record_pb2.CallRecord],
    *,
    left: float,
    top: float,
) -> tuple[list[str], float, float]:
    """Draw a strip a row: grey carry, green where the row owns the loss, hatched where it does not.

    Args:
        rows: to draw.
        records: of the attempt.
        left: where the strips begin.
        top: likewise.

    Returns:
        SVG elements, and how far they reach to the right and down.
    """
    by_id = {record.coords.call_id: record for record in records}
    parts: list[str] = []
    right, y = left, top
    for number, row in enumerate(rows):
        x = left + _LABEL
        parts.append(f'<text class="row" x="{left:.1f}" y="{y + 15:.1f}">row {number}</text>')
        for place, call_id in enumerate(row.call_ids):
            width = _width(by_id[call_id])
            parts.append(_segment(by_id[call_id], x, y, width, owned=place >= row.first_owned))
            x += width
        right, y = max(right, x), y + _STRIP + _GAP
    return parts, right, y


def _segment(
    record: call_record_pb2.CallRecord, x: float, y: float, width: float, *, owned: bool
) -> str:
    coords, generated = record.coords, record.completion.generation_token_count
    cut = width * (1 - generated / max(1, coords.delta_token_count))
    use = "with loss" if owned else "as context"
    title = escape(f"{coords.call_id}: {generated} tokens {use}")
    fill = "#7fc98a" if owned else "url(#idle)"
    return (
        f'<g class="segment"><title>{title}</title>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{cut:.1f}" height="{_STRIP}" fill="#dde"/>'
        f'<rect class="{"owned" if owned else "context"}" x="{x + cut:.1f}" y="{y:.1f}" '
        f'width="{width - cut:.1f}" height="{_STRIP}" fill="{fill}"/>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_STRIP}" fill="none" '
        'stroke="black"/></g>'
    )


def _width(record: call_record_pb2.CallRecord) -> float:
    share = min(1.0, record.coords.delta_token_count / _TOKENS_WIDEST)
    return _CALL_LEAST + share * (_CALL_MOST - _CALL_LEAST)


def _joined(call_ids: Sequence[str]) -> str:
    if len(call_ids) <= _SHOWN_CALLS:
        return " > ".join(call_ids)
    head, tail = call_ids[: _SHOWN_CALLS - 1], call_ids[-1]
    return f"{' > '.join(head)} > ... {len(call_ids) - _SHOWN_CALLS} more ... > {tail}"
