"""A delta request whose history is no longer kept: it can only be answered as a repeat.

Contract: docs/protocol.md, section "Repeats: the same request is the same call".
"""

from __future__ import annotations

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest_client.source_codec import output_summary_to_proto
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.source import output_summary
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import Asked
from callforest_mesh.gateway.evidence import ServedResponse
from callforest_mesh.gateway.json_body import parse_body


class LostHistory:
    """What is known of such a request's history: nothing."""

    def announce(self, intent: attempt_pb2.CallIntent) -> None:
        """Refuse: without its history no call is announced.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"call {intent.call_id} has no history to announce")

    def describe(self, record: call_record_pb2.CallRecord, served: ServedResponse) -> None:
        """Say what was answered. The record names no history: nothing continues such a call."""
        if served.items is None:
            return
        try:
            output = output_summary(served.items)
        except UnreadableItemError:
            return
        record.output.CopyFrom(output_summary_to_proto(output))

    def explain(self, verdict: capture_admission_pb2.Verdict) -> None:
        """Say nothing: there is nothing to compare."""

    def keep(self, call_id: str, served: ServedResponse) -> None:
        """Keep nothing: what the call's history begins with is not here."""


def read_without_history(asked: Asked) -> core.NormalisedRequest:
    """Read how a delta request is to be answered, its history being lost.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
    converted = core.convert(parse_body(asked.body), asked.body, asked.dialect)
    return core.normalised(converted, asked.dialect, asked.body_digest, LostHistory())
