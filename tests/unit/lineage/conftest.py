"""Builders of calls and conversations for the lineage tests."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.chain import ChainProbe, ContextWitness
from callforest_core.lineage.fingerprint import FINGERPRINT_VERSION, ConversationScan

MakeRecord = Callable[..., CallRecord]


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.fixture
def make_record() -> MakeRecord:
    """Make a record: a root of 3 tokens, or 2 tokens behind `parent`."""

    def make(call_id: str, parent: CallRecord | None = None, **changes: object) -> CallRecord:
        prev_len = parent.cum_len if parent else 0
        delta_len = 2 if parent else 3
        record = CallRecord(
            call_id=call_id,
            parent_call_id=parent.call_id if parent else None,
            mode="token_in" if parent else "text",
            prev_len=prev_len,
            delta_len=delta_len,
            cum_len=prev_len + delta_len,
            weight_version=7,
            digest=digest_of(f"digest {call_id}"),
            extras_digest=digest_of("no extras"),
            chain_hash=digest_of(f"chain {call_id}"),
            cumulative_hash=digest_of(f"tokens {call_id}"),
            staging_key=f"attempt/{call_id}",
            response_id=f"resp-{call_id}",
            admitted_at=100.0,
            fingerprint_version=FINGERPRINT_VERSION,
        )
        return replace(record, **changes)

    return make


@pytest.fixture
def probe() -> Callable[[list[object]], ChainProbe]:
    def make(items: list[object]) -> ChainProbe:
        scan = ConversationScan(items)
        return ChainProbe(scan.assistant_fingerprint, scan.context_digests, scan.item_count)

    return make


@pytest.fixture
def witness() -> Callable[[list[object], list[object]], ContextWitness]:
    def make(request: list[object], response: list[object]) -> ContextWitness:
        scan = ConversationScan(request)
        fingerprint = scan.continued(response).fingerprint
        return ContextWitness(fingerprint, scan.item_count, scan.context_digest)

    return make
