"""Which of a delta's tokens a call's routed experts cover (capture contract 6.6)."""

from __future__ import annotations

from enum import StrEnum


class RouteSpan(StrEnum):
    """How staged route rows map to a delta."""

    FULL = "full"
    TAIL = "tail"
    SENTINEL = "sentinel"


def classify_route_span(carry_len: int, generation_len: int, route_rows: int) -> RouteSpan:
    """Say which tokens the staged route rows cover.

    FULL: every token of the delta. TAIL: the last `generation_len` rows are the generation's.
    SENTINEL: none can be placed, so the routes are marked missing.
    """
    if 0 < route_rows == carry_len + generation_len:
        return RouteSpan.FULL
    if 0 < generation_len <= route_rows:
        return RouteSpan.TAIL
    return RouteSpan.SENTINEL
