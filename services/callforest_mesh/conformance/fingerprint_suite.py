"""The `fingerprint` suite: both fingerprints of one conversation in mixed dialects."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from callforest_core.lineage.fingerprint import (
    UnreadableItemError,
    assistant_fingerprint,
    conversation_digest,
)
from callforest_mesh.conformance.json_case import Case, Json, member
from callforest_mesh.conformance.peer_fields import elements


def answer(case: Case) -> Json:
    """Write both fingerprints in hexadecimal, or the reason why there is none."""
    items = elements(member(case, "items"))
    return {
        "assistant_fingerprint": _written(assistant_fingerprint, items),
        "conversation_digest": _written(conversation_digest, items),
    }


def _written(digest: Callable[[Iterable[object]], bytes], items: list[Json]) -> Json:
    try:
        return digest(items).hex()
    except UnreadableItemError as error:
        return {"error": error.fact}
