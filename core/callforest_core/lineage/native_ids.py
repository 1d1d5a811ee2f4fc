"""Ids that a served answer carried: which call an echoed one can name.

A native id names call C if it is C's response id, or C itself, behind one of four prefixes or
nothing, and before `_` and digits or nothing (docs/lineage.md, section 11).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_PREFIXES: Final = ("", "chatcmpl-", "msg_", "rs_", "fc_")


def call_ids_in(native_ids: Iterable[str]) -> frozenset[str]:
    """Return the call ids that these ids can have been made of, response ids apart.

    One id gives several: a call's own id may begin with a prefix or end in `_` and digits.
    Whoever asks knows which of them is a call.
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


def names_call(native_id: str, call_id: str, response_id: str) -> bool:
    """Say whether an id names the call with this response id."""
    return native_id == response_id or call_id in call_ids_in((native_id,))
