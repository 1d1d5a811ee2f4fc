"""Records of an attempt whose answers are known, without tokens."""

from __future__ import annotations

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.source import output_summary

Item = dict[str, object]


def said(text: str, call: str = "") -> Item:
    """A message of the assistant; with the call's native id, if one is named."""
    own: Item = {"id": f"msg_{call}"} if call else {}
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", "content": [part], **own}


def thought(text: str, call: str = "") -> Item:
    own: Item = {"id": f"rs_{call}"} if call else {}
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], **own}


def tool(number: int, call: str = "") -> Item:
    own: Item = {"id": f"fc_{call}_0"} if call else {}
    arguments = f'{{"n":{number}}}'
    used = {"call_id": f"call_{number}", "name": "look", "arguments": arguments}
    return {"type": "function_call", **used, **own}


def seen(number: int) -> Item:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": "42"}


def asked(text: str = "go on") -> Item:
    return {"role": "user", "content": text}


def record(
    call_id: str,
    answer: list[Item] | None,
    parent: CallRecord | None = None,
    *,
    status: str = "completed",
    finish_reason: str = "stop",
    admitted_at: float | None = None,
    intent: int | None = None,
) -> CallRecord:
    """The record of a call of 4 new tokens that answered this."""
    start = 0 if parent is None else parent.cum_len
    digest = call_id.encode().ljust(32, b".")[:32]
    return CallRecord(
        call_id=call_id,
        parent_call_id=None if parent is None else parent.call_id,
        mode="text" if parent is None else "token_in",
        prev_len=start,
        delta_len=4,
        cum_len=start + 4,
        weight_version=1,
        digest=digest,
        extras_digest=digest,
        chain_hash=digest,
        cumulative_hash=digest,
        staging_key=f"r/{call_id}",
        response_id=f"chatcmpl-{call_id}",
        admitted_at=admitted_at,
        finish_reason=finish_reason,
        status=status,
        output=None if answer is None else output_summary(answer),
        intent_number=intent,
    )
