"""A large group is cut from its log record alone; its calls are read a part at a time."""

import hashlib
from collections.abc import Sequence

import pytest

from callforest.capture.v1 import group_batch_pb2, group_part_pb2, receipt_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.frames import FrameAssembler
from callforest_mesh.finalizer import parts
from callforest_mesh.finalizer.groups import make_batch
from callforest_mesh.finalizer.segments import LostCallError
from tests.unit.client.test_certificates import group


class KeptCalls:
    """Staging that has the calls of a group, and keeps what was asked of it."""

    def __init__(self, calls: Sequence[staged_call_pb2.StagedCall]) -> None:
        self._calls = {(call.capture_key, call.call_id): call for call in calls}
        self.asked: list[list[tuple[str, str]]] = []

    async def fetch(
        self, capture_key: str, call_ids: Sequence[str]
    ) -> list[staged_call_pb2.StagedCall]:
        self.asked.append([(capture_key, call_id) for call_id in call_ids])
        found = [self._calls.get(name) for name in self.asked[-1]]
        return [call for call in found if call is not None]

    def lose(self, name: tuple[str, str]) -> None:
        del self._calls[name]


def logged_of(batch: group_batch_pb2.GroupBatch) -> row_log_pb2.LoggedGroup:
    """The log record that a batch was made of."""
    logged = row_log_pb2.LoggedGroup(
        cursor=batch.cursor,
        group_id=batch.group_id,
        rollout_ids=[receipt.rollout_id for receipt in batch.receipts],
        rows=batch.rows,
        row_multiple=batch.row_multiple,
        heuristic_fraction=batch.heuristic_fraction,
        traceparent=batch.traceparent,
        size_bytes=batch.ByteSize(),
    )
    for call in batch.segments:
        logged.segments.add(
            capture_key=call.capture_key,
            call_id=call.call_id,
            digest=call.digest,
            size_bytes=call.ByteSize(),
        )
    return logged


@pytest.fixture
def batch() -> group_batch_pb2.GroupBatch:
    made = group_batch_pb2.GroupBatch()
    made.CopyFrom(group())
    made.cursor, made.traceparent, made.heuristic_fraction = 7, "00-trace", 0.25
    return made


async def sent(parted: parts.PartedGroup) -> list[list[pb.SubscribeRowsResponse]]:
    payloads = []
    while not parted.has_ended:
        payloads.append(list(await parted.next_payload()))
    return payloads


def test_cuts_hold_what_a_part_holds() -> None:
    size = parts.PART_BYTES
    assert parts.cuts([]) == []
    assert parts.cuts([1, 2, 3]) == [slice(0, 3)]
    assert parts.cuts([size // 2, size // 2, 1]) == [slice(0, 2), slice(2, 3)]
    assert parts.cuts([1, 9 * size, 1]) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    unknown = [slice(number, number + 1) for number in range(3)]
    assert parts.cuts([0, 0, 0]) == unknown, "what has no known size is read alone"


@pytest.mark.requirement("FIN-3")
@pytest.mark.parametrize("part_bytes", [1, 700, 1 << 20])
async def test_the_parts_are_the_group_and_are_read_one_by_one(
    batch: group_batch_pb2.GroupBatch, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Held against the written contract, by nothing but frames, hashlib and protobuf's merge."""
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    logged, staging = logged_of(batch), KeptCalls(batch.segments)
    receipts: list[receipt_pb2.Receipt] = list(batch.receipts)
    parted = parts.PartedGroup(logged, receipts, staging, pb.SubscribeRowsResponse)
    (begin,), *framed, (end,) = await sent(parted)
    assert begin.group_begin == group_part_pb2.GroupBegin(
        cursor=7, group_id="g", part_count=len(framed), size_bytes=batch.ByteSize()
    )
    whole, digests, content_bytes, kinds = group_batch_pb2.GroupBatch(), b"", 0, []
    for number, payload in enumerate(framed):
        frames = FrameAssembler()
        frames.begin(0, payload[0].begin)
        for chunk in payload[1:-1]:
            frames.chunk(0, chunk.chunk)
        assert payload[-1].HasField("end")
        digests += payload[0].begin.sha256
        part = group_part_pb2.GroupPart.FromString(frames.end(0))
        assert part.number == number
        lists = [field.name for field, _ in part.content.ListFields() if field.is_repeated]
        assert len(part.content.ListFields()) == 1 or (number == 0 and not lists)
        kinds += lists
        content_bytes += part.content.ByteSize()
        whole.MergeFrom(part.content)
    assert whole.SerializeToString(deterministic=True) == make_batch(
        logged, receipts, batch.segments
    ).SerializeToString(deterministic=True)
    assert whole == batch
    assert end.group_end.sha256 == hashlib.sha256(digests).digest()
    assert content_bytes <= begin.group_begin.size_bytes
    assert kinds == sorted(kinds, key=("receipts", "rows", "segments").index)
    sizes = {(one.capture_key, one.call_id): one.size_bytes for one in logged.segments}
    read = [[sizes[name] for name in names] for names in staging.asked]
    assert all(len(one) == 1 or sum(one) <= part_bytes for one in read)
    assert sum(map(len, read)) == len(batch.segments), "each call is read once"


async def test_a_call_is_read_when_its_part_is_sent(batch: group_batch_pb2.GroupBatch) -> None:
    logged, staging = logged_of(batch), KeptCalls(batch.segments)
    parted = parts.PartedGroup(logged, batch.receipts, staging, pb.SubscribeRowsResponse)
    for _ in range(parted.part_count):
        list(await parted.next_payload())
        assert staging.asked == []
    staging.lose(("r0", "c"))
    with pytest.raises(LostCallError, match="staged_call_missing: r0/c"):
        await parted.next_payload()
    assert not parted.has_ended


def test_a_reader_without_parts_learns_the_group_and_what_to_do(
    batch: group_batch_pb2.GroupBatch,
) -> None:
    refusal = parts.needs_parts(logged_of(batch))
    assert refusal.reason == er.ERROR_REASON_GROUP_NEEDS_PARTS
    size = str(batch.ByteSize())
    assert refusal.facts == {"group_id": "g", "cursor": "7", "size_bytes": size}
    assert "takes_parts" in refusal.message
    assert "after_cursor 7" in refusal.message
