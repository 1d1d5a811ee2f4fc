"""Bug case B04: arguments of a tool call as they were emitted, and as harnesses echo them."""

from __future__ import annotations

from typing import Final, NamedTuple

TWO_TO_53: Final = 2**53
EMITTED: Final = '{"b":2,"a":1}'
LARGE: Final = f'{{"a":{TWO_TO_53 + 1}}}'


class ArgumentEcho(NamedTuple):
    """One case; `expected` is `continuation`, or what the difference is called."""

    emitted: str
    variant: str
    expected: str


ARGUMENT_ECHOES: Final = {
    "i-spaced-and-reordered": ArgumentEcho(EMITTED, '{"a": 1, "b": 2}', "continuation"),
    "ii-escaped": ArgumentEcho(EMITTED, '{"\\u0062":2,"\\u0061":1}', "continuation"),
    "iii-another-value": ArgumentEcho(EMITTED, '{"a":1,"b":3}', "rewritten_history"),
    "iv-a-key-twice": ArgumentEcho(EMITTED, '{"a":1,"a":1,"b":2}', "json"),
    "v-a-float": ArgumentEcho(EMITTED, '{"a":1.0,"b":2}', "json"),
    "vi-exact": ArgumentEcho(LARGE, f'{{"a": {TWO_TO_53 + 1}}}', "continuation"),
    "vi-rounded": ArgumentEcho(LARGE, f'{{"a":{TWO_TO_53}}}', "rewritten_history"),
}
