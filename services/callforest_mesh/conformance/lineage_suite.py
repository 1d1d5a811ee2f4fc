"""The `lineage` suite: a chain-mode ledger is built op by op, then probed."""

from __future__ import annotations

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.chain import (
    ChainProbe,
    ChainView,
    ContextWitness,
    Match,
    Root,
    RowConflictError,
    UnresolvedReason,
)
from callforest_core.lineage.fingerprint import ConversationScan, UnreadableItemError
from callforest_mesh.conformance.json_case import Case, CaseError, Json, member
from callforest_mesh.conformance.peer_fields import PeerParseError, elements, identifier
from callforest_mesh.conformance.peer_json import parse_record


def answer(case: Case) -> Json:
    """Say what each op did, which rows stand, and the verdict on each query."""
    view: ChainView[CallRecord] = ChainView()
    ops: list[Json] = [_apply(view, op) for op in _cases(case, "ops")]
    manifest = view.manifest()
    return {
        "ops": ops,
        "has_rows": view.has_rows(),
        "manifest": {
            "records": [record.call_id for record in manifest.records],
            "failures": [[failure.call_id, failure.reason] for failure in manifest.failures],
        },
        "queries": [_verdict(view, query) for query in _cases(case, "queries")],
    }


def _apply(view: ChainView[CallRecord], op: Case) -> Json:
    kind = member(op, "op")
    if kind not in ("commit", "failure"):
        raise CaseError(f"unknown op {kind!r}")
    try:
        if kind == "commit":
            _commit(view, op)
        else:
            call_id = identifier(member(op, "model_call_id"))
            view.append_failure(call_id, identifier(member(op, "reason")))
    except (PeerParseError, RowConflictError, UnreadableItemError):
        return "refused"
    return "ok"


def _commit(view: ChainView[CallRecord], op: Case) -> None:
    record = parse_record(member(op, "record"))
    chain = [identifier(key) for key in elements(member(op, "staging_chain"))]
    scan = ConversationScan(elements(member(op, "request_items")))
    fingerprint = scan.continued(elements(member(op, "response_items"))).fingerprint
    witness = ContextWitness(fingerprint, scan.item_count, scan.context_digest)
    view.append_record(record, witness, chain)


def _verdict(view: ChainView[CallRecord], query: Case) -> Json:
    try:
        scan = ConversationScan(elements(member(query, "request_items")))
        probe = ChainProbe(scan.assistant_fingerprint, scan.context_digests, scan.item_count)
        verdict = view.resolve(probe)
    except UnreadableItemError:
        return {"outcome": "ERROR"}
    if isinstance(verdict, Root):
        return {"outcome": "ROOT", "resolution": "unresolved" if verdict.seeded else "root"}
    if isinstance(verdict, Match):
        return {
            "outcome": "MATCH",
            "resolution": "resolved",
            "parent_call_id": verdict.parent_call_id,
            "prev_len": verdict.prev_len,
            "chain_hash": verdict.chain_hash.hex(),
            "staging_chain": list(view.staging_chain(verdict.parent_call_id)),
        }
    unchained = verdict.reason is UnresolvedReason.PARENT_NOT_CHAINED
    return {"outcome": "UNRESOLVED", "resolution": "resolved" if unchained else "unresolved"}


def _cases(case: Case, name: str) -> list[Case]:
    cases: list[Case] = []
    for holder in elements(member(case, name)):
        if not isinstance(holder, dict):
            raise CaseError(f"{name} holds something else than objects")
        cases.append(holder)
    return cases
