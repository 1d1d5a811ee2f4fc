"""W3C trace contexts as they travel with requests and items: one short string each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# A later version may say more behind the flags; version ff is none.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII,
)
_SAMPLED: Final = 0x01
_KNOWN_FLAGS: Final = 0x03


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as another process names it.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        flags: 8 bits; the lowest says whether the trace is recorded.
    """

    trace_id: int
    span_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the caller records its trace."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The context as text, 55 characters of version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags & _KNOWN_FLAGS:02x}"


def parse_traceparent(text: str) -> TraceContext | None:
    """Read a `traceparent`; None when it is none, and then the trace begins anew (W3C, 4.3)."""
    if not text:
        return None
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    context = TraceContext(int(found["trace"], 16), int(found["span"], 16), int(found["flags"], 16))
    return context if context.trace_id and context.span_id else None
