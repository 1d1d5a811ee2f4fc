"""The names of the stores, for what must not load one to know them."""

from __future__ import annotations

from typing import Final

STORES: Final = ("finalizer", "ledger", "staging")
"""Each before those whose content its own refers to: snapshots taken in this order lack nothing
that they refer to, but what was consumed between them."""
