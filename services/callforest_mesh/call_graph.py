"""The calls of an attempt as an SVG: a box a call, an edge to its parent, its loss marked.

A box is as wide as its delta has tokens: the carry is grey, the generation green when the call
trains, crossed when a finalized rollout left it out, and hatched before that. Below are the rows, a
strip each: green where the row owns the loss, hatched where a call is context there; then the calls
that have no tokens, and what the marks mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from callforest.capture.v1 import call_record_pb2, receipt_pb2
from callforest_client.ledger import Manifest
from callforest_mesh.attempt_report import children_of, selected_calls
from callforest_mesh.training_rows import draw_rows, rows_of

_ROW = 54
_BOX = 34
_GAP = 28
_WIDTH_LEAST = 120
_WIDTH_MOST = 360
_TOKENS_WIDEST = 4096
_CALLS_MOST = 2000
_MARGIN = 16
_LEGEND = 40
_LINE = 16
_NOTES_MOST = 40


@dataclass(frozen=True, slots=True)
class _Box:
    record: call_record_pb2.CallRecord
    x: float
    y: float
    width: float


class TooManyCallsError(Exception):
    """An attempt has more calls than a picture can show."""


def draw(manifest: Manifest, receipt: receipt_pb2.Receipt | None) -> str:
    """Draw an attempt; give the SVG document. A receipt of another attempt is none of this one.

    Raises:
        TooManyCallsError: it has more than 2,000 calls.
    """
    if len(manifest.records) > _CALLS_MOST:
        raise TooManyCallsError(f"more than {_CALLS_MOST} calls cannot be drawn")
    if receipt is not None and receipt.capture_key != manifest.attempt.capture_key:
        receipt = None  # of another attempt of the rollout
    boxes = _place(manifest)
    selected = selected_calls(receipt)
    parts = [_edge(boxes, box) for box in boxes.values()]
    for box in boxes.values():
        mark = (
            "loss" if box.record.coords.call_id in selected else "rejected" if receipt else "idle"
        )
        parts.append(_draw_box(box, mark))
    right = max((box.x + box.width for box in boxes.values()), default=_WIDTH_MOST)
    bottom = max((box.y + _BOX for box in boxes.values()), default=_LEGEND) + _MARGIN
    strips, strips_right, bottom = draw_rows(
        rows_of(manifest, receipt), manifest.records, left=_MARGIN, top=bottom
    )
    parts += strips
    notes = [*_without_tokens(manifest), _LEGEND_TEXT]
    parts += [_note(text, bottom + _LINE * number) for number, text in enumerate(notes)]
    bottom += _LINE * len(notes) + _MARGIN
    width, height = max(right, strips_right, _WIDTH_MOST) + _MARGIN, bottom
    title = escape(f"{manifest.attempt.capture_key}: {len(boxes)} calls, {_verdict(receipt)}")
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="{_NAMESPACE}" {size} font-family="sans-serif" font-size="11">',
            _PATTERN,
            f'<text x="{_MARGIN}" y="24" font-size="14">{title}</text>',
            *filter(None, parts),
            "</svg>",
            "",
        ]
    )


_NAMESPACE = "http://www.w3.org/2000/svg"
_FILLS = {"loss": "#7fc98a", "rejected": "url(#rejected)", "idle": "url(#idle)"}
_LEGEND_TEXT = "grey: prompt; green: trains; crossed: left out; hatched: context, or not finalized"
_PATTERN = (
    '<defs><pattern id="rejected" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<rect width="8" height="8" fill="#f6eaea"/>'
    '<path d="M0 0 L8 8 M8 0 L0 8" stroke="#c79a9a" stroke-width="1"/></pattern>'
    '</defs><defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#eef3ee"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#a9bfa9" stroke-width="2"/></pattern></defs>'
)


def _place(manifest: Manifest) -> Mapping[str, _Box]:
    """Place children right of their parent, each leaf on a row of its own."""
    children = children_of(manifest.records)
    boxes: dict[str, _Box] = {}
    row = 0
    stack = [(record, float(_MARGIN), True) for record in reversed(children[""])]
    while stack:
        record, x, first = stack.pop()
        if not first or not boxes:
            row += bool(boxes)
        elif not record.coords.HasField("parent_call_id"):
            row += 1
        box = _Box(record, x, _LEGEND + row * _ROW, _width(record))
        boxes[record.coords.call_id] = box
        below = children.get(record.coords.call_id, [])
        right = x + box.width + _GAP
        stack.extend(
            (child, right, index == 0) for index, child in reversed(list(enumerate(below)))
        )
    return boxes


def _width(record: call_record_pb2.CallRecord) -> float:
    share = min(1.0, record.coords.delta_token_count / _TOKENS_WIDEST)
    return _WIDTH_LEAST + share * (_WIDTH_MOST - _WIDTH_LEAST)


def _edge(boxes: Mapping[str, _Box], box: _Box) -> str:
    parent = boxes.get(box.record.coords.parent_call_id)
    if parent is None:
        return ""
    x1, y1 = parent.x + parent.width, parent.y + _BOX / 2
    x2, y2 = box.x, box.y + _BOX / 2
    middle = (x1 + x2) / 2
    return (
        f'<path d="M{x1:.1f} {y1:.1f} C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} '
        f'{x2:.1f} {y2:.1f}" fill="none" stroke="slategray"/>'
    )


def _without_tokens(manifest: Manifest) -> list[str]:
    """Name the calls of which no tokens can be verified."""
    failed = [f"failed {one.call_id}: {one.reason}" for one in manifest.failures]
    pending = [f"pending {call_id}" for call_id in manifest.attempt.pending_call_ids]
    named = [*failed, *pending]
    more = [f"and {len(named) - _NOTES_MOST} more"] if len(named) > _NOTES_MOST else []
    return named[:_NOTES_MOST] + more


def _note(text: str, y: float) -> str:
    return f'<text class="note" x="{_MARGIN}" y="{y + 12:.1f}" fill="dimgray">{escape(text)}</text>'


def _draw_box(box: _Box, mark: str) -> str:
    coords, completion = box.record.coords, box.record.completion
    generated = completion.generation_token_count
    cut = box.width * (1 - generated / max(1, coords.delta_token_count))
    label = escape(coords.call_id[-18:])
    carried = coords.delta_token_count - generated
    detail = escape(
        f"{coords.call_id}: {coords.prev_token_count} inherited, {carried} carried, "
        f"{generated} generated, weights {coords.weight_version}, {completion.finish_reason}"
    )
    return (
        f'<g class="call"><title>{detail}</title>'
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{cut:.1f}" height="{_BOX}" fill="#dde"/>'
        f'<rect class="{mark}" x="{box.x + cut:.1f}" y="{box.y:.1f}" '
        f'width="{box.width - cut:.1f}" height="{_BOX}" fill="{_FILLS[mark]}"/>'
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{_BOX}" '
        'fill="none" stroke="black"/>'
        f'<text x="{box.x + 6:.1f}" y="{box.y + 14:.1f}">{label}</text>'
        f'<text x="{box.x + 6:.1f}" y="{box.y + 28:.1f}">{carried} + {generated}</text></g>'
    )


def _verdict(receipt: receipt_pb2.Receipt | None) -> str:
    if receipt is None:
        return "not finalized"
    return f"masked ({receipt.mask_reason})" if receipt.masked else "green tokens have loss"
