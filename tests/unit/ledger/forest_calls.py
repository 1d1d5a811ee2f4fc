"""Calls of forest mode: what the gateway and the worker would send to the ledger."""

from __future__ import annotations

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
)
from callforest.ledger.v1 import ledger_service_pb2
from callforest_client.source_codec import (
    output_summary_to_proto,
    source_probe_to_proto,
    source_summary_to_proto,
)
from callforest_core.lineage.source import (
    EMPTY_HISTORY,
    output_summary,
    source_render_digest,
)
from callforest_mesh.ledger import core
from tests.unit.ledger import calls
from tests.unit.ledger.calls import FIRST, KEY, Attempt, Items, digest, said

CHAIN = attempt_pb2.CAPTURE_MODE_CHAIN
FOREST = attempt_pb2.CAPTURE_MODE_FOREST
RENDER = source_render_digest({"model": "m"})
ENGINE = digest("configuration")


def source_probe(items: Items, claim: str | None = None) -> capture_admission_pb2.SourceProbe:
    return source_probe_to_proto(EMPTY_HISTORY.extended(items).probe(RENDER, claim))


def forest_intent(
    call_id: str,
    items: Items = FIRST,
    *,
    body: str = "body",
    key: str = KEY,
    claim: str | None = None,
    engine: bytes = ENGINE,
) -> attempt_pb2.CallIntent:
    made = attempt_pb2.CallIntent(
        capture_key=key,
        call_id=call_id,
        body_digest=digest(body),
        source=source_probe(items, claim),
        configuration_digest=engine,
    )
    made.admit_time.FromSeconds(1_700_000_000)
    return made


def forest_asking(
    items: Items, *, claim: str | None = None, engine: bytes = ENGINE
) -> ledger_service_pb2.FindPredecessorRequest:
    return ledger_service_pb2.FindPredecessorRequest(
        tenant=calls.TENANT,
        capture_key=KEY,
        source=source_probe(items, claim),
        configuration_digest=engine,
    )


def decided(*, fresh: str = "", spliced: bool = False) -> capture_admission_pb2.CaptureDecision:
    if spliced:
        return capture_admission_pb2.CaptureDecision(
            input=capture_admission_pb2.CAPTURE_INPUT_SPLICED, proof=digest("proof")
        )
    return capture_admission_pb2.CaptureDecision(
        input=capture_admission_pb2.CAPTURE_INPUT_ROOT, reason=fresh
    )


def forest_record(
    call_id: str,
    items: Items = FIRST,
    answer: str = "A",
    *,
    parent: call_record_pb2.CallRecord | None = None,
    fresh: str = "",
    key: str = KEY,
) -> call_record_pb2.CallRecord:
    """Make the record of a call; `fresh` says why the worker made a root of a continuation."""
    made = calls.record(call_id, items, answer, parent=parent, key=key)
    made.ClearField("fingerprints")
    served = [said(answer)]
    history = EMPTY_HISTORY.extended(items).extended(served)
    made.replay.CopyFrom(source_summary_to_proto(history.summary(RENDER)))
    made.output.CopyFrom(output_summary_to_proto(output_summary(served)))
    made.decision.CopyFrom(decided(fresh=fresh, spliced=parent is not None))
    return made


class ForestAttempt(Attempt):
    """An attempt of forest mode without a store."""

    def __init__(self) -> None:
        super().__init__(FOREST)

    def announce(
        self,
        call_id: str,
        items: Items = FIRST,
        *,
        claim: str | None = None,
        engine: bytes = ENGINE,
    ) -> capture_admission_pb2.Verdict:
        asked = forest_intent(call_id, items, claim=claim, engine=engine)
        return self.apply(core.record_intent(self.view, asked)).answer
