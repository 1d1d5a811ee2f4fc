"""Ids that a served answer carried: which call an echoed one can name.

The gateway serves `chatcmpl-<call>`, `rs_<call>`, `msg_<call>`, and `fc_<call>_<n>`. Anything else
is another system's id and names nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_PREFIXES: Final = ("chatcmpl-", "rs_", "msg_", "fc_")


def call_ids_in(native_ids: Iterable[str]) -> frozenset[str]:
    """Return the call ids that these ids can have been made of.

    A call id may itself end in `_` and digits; then an id gives two, and whoever asks knows which
    of them is a call.
    """
    found: set[str] = set()
    for native_id in native_ids:
        for prefix in _PREFIXES:
            if native_id.startswith(prefix):
                stem = native_id[len(prefix) :]
                call_id, _, number = stem.rpartition("_")
                found.add(stem)
                if number.isascii() and number.isdigit():
                    found.add(call_id)
    found.discard("")
    return frozenset(found)
