"""The reward curve of a run as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 44, 44
_TICKS = 4
_GRID = 'stroke="#e3e8e4"'
_FAINT = 'fill="#5b6b60"'
_OPENING = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    ' font-family="system-ui, sans-serif" font-size="12">'
)


def draw_curve(values: Sequence[float], *, title: str, axis: str) -> str:
    """Draw one value a step.

    Args:
        values: step 1 first; at least one.
        title: stands above the picture.
        axis: names the value.
    """
    low, high = min(0.0, *values), max(*values, 0.0)
    span = (high - low) or 1.0
    inner_width = _WIDTH - _LEFT - _RIGHT
    inner_height = _HEIGHT - _TOP - _BOTTOM

    def x_of(index: int) -> float:
        return _LEFT + inner_width * (index / max(1, len(values) - 1))

    def y_of(value: float) -> float:
        return _TOP + inner_height * (1 - (value - low) / span)

    parts = [
        _OPENING,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" fill="#14301f">{title}</text>',
    ]
    for tick in range(_TICKS + 1):
        value = low + span * tick / _TICKS
        y = y_of(value)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" {_GRID}/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" {_FAINT}>{value:.2f}</text>'
        )
    points = " ".join(f"{x_of(i):.1f},{y_of(value):.1f}" for i, value in enumerate(values))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#2c7a4b" stroke-width="2.5"/>')
    for index, value in enumerate(values):
        parts.append(
            f'<circle cx="{x_of(index):.1f}" cy="{y_of(value):.1f}" r="4" fill="#2c7a4b">'
            f"<title>step {index + 1}: {value:.4f}</title></circle>"
            f'<text x="{x_of(index):.1f}" y="{_HEIGHT - 22}" text-anchor="middle"'
            f" {_FAINT}>{index + 1}</text>"
        )
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle" fill="#5b6b60">'
        f"optimizer step, {axis}</text></svg>"
    )
    return "\n".join(parts) + "\n"
