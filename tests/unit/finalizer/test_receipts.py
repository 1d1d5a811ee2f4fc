"""The receipt's digest against a pre-image written out by hand from docs/protocol.md."""

import hashlib
import math

import pytest

from callforest.capture.v1 import receipt_pb2
from callforest_core.forest.receipts import receipt_digest

FULL = receipt_pb2.Receipt(
    group_id="g1",
    rollout_id="roll",
    slot=3,
    capture_key="roll-a2",
    epoch=3,
    revision=258,
    reward=-1.5,
    masked=True,
    mask_reason="é",
    terminal_call_id="c1",
    terminal_selection="declared",
    truncated=True,
    calls=[
        receipt_pb2.ReceiptCall(call_id="c1", digest=b"\x11" * 32, selected=True),
        receipt_pb2.ReceiptCall(call_id="c22", digest=b"\x22" * 32, selected=False),
    ],
)
FULL_LAYOUT = (
    b"callforest-receipt-v1"
    b"\x00\x00\x00\x00\x00\x00\x00\x02g1"
    b"\x00\x00\x00\x00\x00\x00\x00\x04roll"
    b"\x00\x00\x00\x00\x00\x00\x00\x03"
    b"\x00\x00\x00\x00\x00\x00\x00\x07roll-a2"
    b"\x00\x00\x00\x00\x00\x00\x00\x03"
    b"\x00\x00\x00\x00\x00\x00\x01\x02"
    b"\xbf\xf8\x00\x00\x00\x00\x00\x00"
    b"\x01"
    b"\x00\x00\x00\x00\x00\x00\x00\x02\xc3\xa9"
    b"\x01\x00\x00\x00\x00\x00\x00\x00\x02c1"
    b"\x00\x00\x00\x00\x00\x00\x00\x08declared"
    b"\x01"
    b"\x00\x00\x00\x00\x00\x00\x00\x02"
    b"\x00\x00\x00\x00\x00\x00\x00\x02c1" + b"\x11" * 32 + b"\x01"
    b"\x00\x00\x00\x00\x00\x00\x00\x03c22" + b"\x22" * 32 + b"\x00"
)
EMPTY_LAYOUT = (
    b"callforest-receipt-v1"
    + bytes(8)  # group
    + bytes(8)  # rollout
    + bytes(8)  # slot
    + bytes(8)  # capture key
    + bytes(16)  # epoch, revision
    + bytes(8)  # reward 0.0
    + b"\x00"  # not masked
    + bytes(8)  # mask reason
    + b"\x00"  # no terminal
    + bytes(8)  # stage
    + b"\x00"  # not truncated
    + bytes(8)  # no calls
)


def test_the_layout_is_the_written_one() -> None:
    assert receipt_digest(FULL) == hashlib.sha256(FULL_LAYOUT).digest()
    assert receipt_digest(receipt_pb2.Receipt()) == hashlib.sha256(EMPTY_LAYOUT).digest()


def test_an_absent_terminal_differs_from_one_without_a_name() -> None:
    assert receipt_digest(receipt_pb2.Receipt(terminal_call_id="")) != receipt_digest(
        receipt_pb2.Receipt()
    )


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "g2"},
        {"rollout_id": "rol"},
        {"slot": 4},
        {"capture_key": "roll"},
        {"epoch": 4},
        {"revision": 259},
        {"reward": math.nextafter(-1.5, 0)},
        {"masked": False},
        {"mask_reason": "e"},
        {"terminal_call_id": "c22"},
        {"terminal_selection": "content"},
        {"truncated": False},
    ],
)
def test_every_covered_field_changes_it(change: dict[str, object]) -> None:
    changed = receipt_pb2.Receipt()
    changed.CopyFrom(FULL)
    for name, value in change.items():
        setattr(changed, name, value)
    assert receipt_digest(changed) != receipt_digest(FULL)


def test_calls_are_covered_with_their_order_and_selection() -> None:
    swapped, unselected = receipt_pb2.Receipt(), receipt_pb2.Receipt()
    swapped.CopyFrom(FULL)
    swapped.calls.reverse()
    unselected.CopyFrom(FULL)
    unselected.calls[0].selected = False
    digests = {receipt_digest(each) for each in (FULL, swapped, unselected)}
    assert len(digests) == 3


def test_what_only_explains_is_not_covered() -> None:
    explained = receipt_pb2.Receipt()
    explained.CopyFrom(FULL)
    explained.mask_detail, explained.mask_cause = "because", "reason/cause"
    explained.terminal_trail = "declared"
    assert receipt_digest(explained) == receipt_digest(FULL)
