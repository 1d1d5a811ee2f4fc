"""A group that came in parts is given whole or not at all: nothing missing, doubled or changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError

from callforest.capture.v1 import frame_pb2, group_batch_pb2, group_part_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client import group_assembly
from callforest_client.errors import RefusedError
from callforest_client.frames import FRAME_FIELDS, frames_of
from callforest_client.group_assembly import GroupAssembler, GroupTooLargeError
from callforest_core.refusal import Refusal
from tests.unit.client.test_certificates import group

Response = pb.SubscribeRowsResponse
Payloads = list[list[Response]]
Change = Callable[[Payloads], None]


def contents() -> list[group_batch_pb2.GroupBatch]:
    """The pieces of a group: its head, each receipt, each row, each call."""
    whole = group()
    head = group_batch_pb2.GroupBatch(cursor=5, group_id="g", row_multiple=4)
    return [
        head,
        *(group_batch_pb2.GroupBatch(receipts=[one]) for one in whole.receipts),
        *(group_batch_pb2.GroupBatch(rows=[one]) for one in whole.rows),
        *(group_batch_pb2.GroupBatch(segments=[one]) for one in whole.segments),
    ]


def framed(serialized: bytes) -> list[Response]:
    return [Response(**{FRAME_FIELDS[type(frame)]: frame}) for frame in frames_of(serialized)]


def part(number: int, content: group_batch_pb2.GroupBatch) -> list[Response]:
    made = group_part_pb2.GroupPart(number=number, content=content)
    return framed(made.SerializeToString())


def closing(payloads: Payloads) -> list[Response]:
    """The end that fits the parts before it."""
    digests = b"".join(one[0].begin.sha256 for one in payloads if one[0].HasField("begin"))
    end = group_part_pb2.GroupEnd(sha256=hashlib.sha256(digests).digest())
    return [Response(group_end=end)]


def parted() -> Payloads:
    """A group in parts, as it is sent."""
    pieces = contents()
    begin = group_part_pb2.GroupBegin(
        cursor=5, group_id="g", part_count=len(pieces), size_bytes=group().ByteSize()
    )
    payloads = [[Response(group_begin=begin)]]
    payloads += [part(number, piece) for number, piece in enumerate(pieces)]
    return [*payloads, closing(payloads)]


def given(payloads: Payloads, assembler: GroupAssembler) -> list[group_batch_pb2.GroupBatch]:
    taken = [assembler.take(message) for payload in payloads for message in payload]
    return [batch for batch in taken if batch is not None]


def whole() -> group_batch_pb2.GroupBatch:
    batch = group_batch_pb2.GroupBatch()
    batch.CopyFrom(group())
    batch.cursor = 5
    return batch


@pytest.mark.requirement("FIN-3", "FIN-4")
def test_parts_are_the_group_and_groups_follow_each_other() -> None:
    assembler = GroupAssembler()
    assert given(parted(), assembler) == [whole()]
    follows = group_batch_pb2.GroupBatch(cursor=6)
    assert given([[Response(batch=follows)]], assembler) == [follows]
    follows.cursor = 7
    assert given([framed(follows.SerializeToString())], assembler) == [follows]
    assert given(parted(), assembler) == [whole()]
    between = parted()
    between.insert(4, [Response(committed=pb.CommitCursor(cursor=4))])
    assert given(between, assembler) == [whole()], "a confirmation may stand between parts"


def _lost(payloads: Payloads) -> None:
    del payloads[3]


def _lost_and_closed(payloads: Payloads) -> None:
    """The digest fits what came."""
    del payloads[-2:]
    payloads.append(closing(payloads))


def _renumbered(payloads: Payloads) -> None:
    """One is lost, those behind it are renumbered, and the digest fits what came."""
    pieces = contents()
    del pieces[-2]
    payloads[1:] = [part(number, piece) for number, piece in enumerate(pieces)]
    payloads.append(closing(payloads))


def _doubled(payloads: Payloads) -> None:
    payloads.insert(3, payloads[3])


def _doubled_at_the_end(payloads: Payloads) -> None:
    payloads.insert(-1, part(len(payloads) - 2, contents()[-1]))
    payloads[-1:] = [closing(payloads)]


def _in_place_of_another(payloads: Payloads) -> None:
    """The count is right, and the digest fits what came."""
    payloads[4] = payloads[3]
    payloads[-1:] = [closing(payloads[:-1])]


def _begun_beside_the_last(payloads: Payloads) -> None:
    payloads[-2].append(payloads[-2][0])


def _group_begun_within_a_payload(payloads: Payloads) -> None:
    payloads[0].insert(0, framed(whole().SerializeToString())[0])
    del payloads[1:]


def _group_within_a_payload(payloads: Payloads) -> None:
    payloads[:] = [[framed(whole().SerializeToString())[0], Response(batch=whole())]]


def _dropped_within_a_part(payloads: Payloads) -> None:
    dropped = group_batch_pb2.GroupBatch(cursor=5, group_id="g", drop_reason="late")
    payloads[2].insert(1, Response(batch=dropped))


def _swapped(payloads: Payloads) -> None:
    payloads[3], payloads[4] = payloads[4], payloads[3]


def _flipped(payloads: Payloads) -> None:
    """A byte changes within frames."""
    chunk = frame_pb2.FrameChunk.FromString(payloads[-2][1].chunk.SerializeToString())
    chunk.content = chunk.content[:-1] + bytes([chunk.content[-1] ^ 1])
    payloads[-2][1] = Response(chunk=chunk)


def _changed(payloads: Payloads) -> None:
    """A part changes with its frames: the digest of all is another."""
    receipt = contents()[1]
    receipt.receipts[0].reward += 1
    payloads[2] = part(1, receipt)


def _renamed(payloads: Payloads) -> None:
    head = contents()[0]
    head.group_id = "other"
    payloads[1] = part(0, head)
    payloads[-1:] = [closing(payloads[:-1])]


def _moved(payloads: Payloads) -> None:
    """A later part claims another position."""
    call = contents()[-1]
    call.cursor = 6
    payloads[-2] = part(len(contents()) - 1, call)
    payloads[-1:] = [closing(payloads[:-1])]


def _no_parts(payloads: Payloads) -> None:
    begin = group_part_pb2.GroupBegin(cursor=0, group_id="", part_count=0)
    payloads[:] = [[Response(group_begin=begin)], closing([])]


def _begun_twice(payloads: Payloads) -> None:
    payloads.insert(2, payloads[0])


def _begun_within_a_part(payloads: Payloads) -> None:
    payloads[1].insert(1, payloads[0][0])


def _part_within_a_part(payloads: Payloads) -> None:
    payloads[1].insert(1, payloads[2][0])


def _closed_within_a_part(payloads: Payloads) -> None:
    del payloads[-2][-1]


def _never_begun(payloads: Payloads) -> None:
    del payloads[:-1]


def _whole_group_within(payloads: Payloads) -> None:
    payloads.insert(3, [Response(batch=whole())])


def _other_group_dropped_within(payloads: Payloads) -> None:
    dropped = group_batch_pb2.GroupBatch(cursor=6, group_id="g2", drop_reason="late")
    payloads.insert(3, [Response(batch=dropped)])


def _group_within_a_part(payloads: Payloads) -> None:
    payloads[2].insert(1, Response(batch=group_batch_pb2.GroupBatch(cursor=5, group_id="g")))


CHANGES: list[Change] = [
    *(_lost, _lost_and_closed, _renumbered, _doubled, _doubled_at_the_end, _swapped, _flipped),
    *(_changed, _renamed, _moved, _no_parts, _begun_twice, _begun_within_a_part),
    *(_part_within_a_part, _closed_within_a_part, _never_begun, _whole_group_within),
    *(_other_group_dropped_within, _group_within_a_part, _in_place_of_another),
    *(_begun_beside_the_last, _group_begun_within_a_payload, _group_within_a_payload),
    _dropped_within_a_part,
]


@pytest.mark.requirement("FIN-3", "FIN-4")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_missing_doubled_or_changed_part_is_refused(change: Change) -> None:
    payloads, assembler = parted(), GroupAssembler()
    change(payloads)
    taken: list[group_batch_pb2.GroupBatch | None] = []
    with pytest.raises(Refusal) as caught:
        taken.extend(assembler.take(message) for payload in payloads for message in payload)
    assert caught.value.reason == er.ERROR_REASON_FRAME_BROKEN
    assert not any(taken), "nothing of the group was given"


def test_what_is_no_part_is_refused() -> None:
    payloads = parted()
    payloads[1] = framed(b"\xff\xff\xff")
    with pytest.raises(DecodeError):
        given(payloads, GroupAssembler())


@pytest.mark.requirement("FIN-4")
@pytest.mark.parametrize("parts_before", [0, 1, 12])
def test_a_group_that_is_dropped_meanwhile_is_the_dropped_one(parts_before: int) -> None:
    dropped = group_batch_pb2.GroupBatch(cursor=5, group_id="g", drop_reason="staged_call_missing")
    payloads = [*parted()[: 1 + parts_before], [Response(batch=dropped)], *parted()]
    assert given(payloads, GroupAssembler()) == [dropped, whole()]


def limited(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> GroupAssembler:
    monkeypatch.setattr(group_assembly, "GROUP_BYTES_LEAST", 1)
    return GroupAssembler(bytes_max)


def test_a_group_that_is_announced_too_large_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assembler = limited(monkeypatch, group().ByteSize() - 1)
    with pytest.raises(GroupTooLargeError) as caught:
        assembler.take(parted()[0][0])
    error = caught.value
    assert isinstance(error, RefusedError)
    assert error.retry_after_ms is None
    assert error.metadata == {
        "group_id": "g",
        "cursor": "5",
        "size_bytes": str(group().ByteSize()),
        "limit_bytes": str(group().ByteSize() - 1),
    }
    assert "group_bytes_max" in error.message


def test_a_part_that_makes_a_group_too_large_is_refused_before_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payloads = parted()
    size = sum(one[0].begin.size_bytes for one in payloads)
    assert given(payloads, limited(monkeypatch, size)) == [whole()]
    payloads[0][0].group_begin.size_bytes = 1
    assembler = limited(monkeypatch, size - 1)
    given(payloads[:-2], assembler)
    with pytest.raises(GroupTooLargeError):
        assembler.take(payloads[-2][0])


def test_a_limit_below_one_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="group_bytes_max"):
        GroupAssembler((64 << 20) - 1)
