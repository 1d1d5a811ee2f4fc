"""A store played by hand, and the calls that a worker gets."""

import json
from collections.abc import Awaitable, Callable

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    capture_admission_pb2,
    commit_coords_pb2,
    item_pb2,
    staged_call_pb2,
)
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import coords_of

CONTEXT = item_pb2.ItemContext(sequence=1, tenant="t", timeout_ms=60_000)
USER = {"role": "user", "content": "go"}


class PlayedStaging:
    """A store that confirms what it gets, unless told otherwise."""

    def __init__(self) -> None:
        self.calls: list[staged_call_pb2.StagedCall] = []
        self.queries: list[staging_pb.PrefixQuery] = []
        self.tenants: list[str] = []
        self.staging: Callable[[], Awaitable[None]] | None = None
        self.receipt: staging_pb.StagedReceipt | Exception | None = None
        self.prefix: staging_pb.Prefix | Exception | None = None
        self.fetched: list[tuple[str, str]] = []
        self.fetching: Exception | None = None

    def for_tenant(self, tenant: str) -> "PlayedStaging":
        self.tenants.append(tenant)
        return self

    async def stage(
        self, call: staged_call_pb2.StagedCall, **_sent: object
    ) -> staging_pb.StagedReceipt:
        if self.staging is not None:
            await self.staging()
        if isinstance(self.receipt, Exception):
            raise self.receipt
        self.calls.append(call)
        return self.receipt or staging_pb.StagedReceipt(coords=coords_of(call))

    async def fetch(
        self, capture_key: str, call_ids: list[str], **asked: object
    ) -> list[staged_call_pb2.StagedCall]:
        assert asked["without_columns"] is True
        self.fetched += [(capture_key, call_id) for call_id in call_ids]
        if self.fetching is not None:
            raise self.fetching
        known = {(one.capture_key, one.call_id): one for one in self.calls}
        return [known[capture_key, call_id] for call_id in call_ids]

    async def fetch_prefix(
        self, query: staging_pb.PrefixQuery, **_sent: object
    ) -> staging_pb.Prefix:
        self.queries.append(query)
        if isinstance(self.prefix, Exception):
            raise self.prefix
        assert self.prefix is not None
        return self.prefix


def call_of(
    *messages: object, call_id: str = "c", position: object = None, captured: bool = True
) -> pb.GenerateCall:
    call = pb.GenerateCall(
        capture_key="k",
        call_id=call_id,
        create_time=timestamp_pb2.Timestamp(seconds=9),
        chat_request=json.dumps({"messages": messages or [USER]}).encode(),
    )
    if captured:
        field = "continuation" if position is not None else "root"
        admission = capture_admission_pb2.CaptureAdmission(
            capture_key="k",
            call_id=call_id,
            **{field: position or capture_admission_pb2.Root()},
        )
        call.admission.CopyFrom(admission)
    return call


def behind(coords: commit_coords_pb2.CommitCoords) -> capture_admission_pb2.Continuation:
    return capture_admission_pb2.Continuation(
        parent_call_id=coords.call_id,
        prev_token_count=coords.prev_token_count + coords.delta_token_count,
        parent_chain_hash=coords.chain_hash,
    )
