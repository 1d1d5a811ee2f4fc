"""Requests of forest mode that are read and served without a mesh."""

from __future__ import annotations

import json

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core

CHAT, RESPONSES = Dialect.CHAT, Dialect.RESPONSES
GO = {"role": "user", "content": "go"}


def body_of(dialect: Dialect, turns: object, **fields: object) -> bytes:
    name = core.turns_name(dialect)
    return json.dumps({"model": "m", name: turns, **fields}).encode()


def serve(
    request: core.NormalisedRequest, call_id: str, message: dict[str, object]
) -> core.ServedResponse:
    """Be the engine, and keep the call as one that has its record."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    completion = {"id": f"chatcmpl-{call_id}", "choices": [choice]}
    served = core.read_response(json.dumps(completion).encode(), request)
    request.evidence.keep(call_id, served)
    return served
