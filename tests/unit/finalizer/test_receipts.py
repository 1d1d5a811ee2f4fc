"""The receipt's digest against a pre-image written out by hand from docs/protocol.md."""

import hashlib
import math

import pytest

from callforest.capture.v1 import attempt_pb2, receipt_pb2
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


FOREST = receipt_pb2.Receipt(
    group_id="g1",
    rollout_id="roll",
    slot=3,
    capture_key="roll-a2",
    epoch=3,
    revision=258,
    reward=-1.5,
    terminal_call_id="c22",
    terminal_selection="content",
    truncated=True,
    mode=attempt_pb2.CAPTURE_MODE_FOREST,
    selection_policy="all_captured",
    environment_masked=True,
    generated_token_count=7,
    total_token_count=258,
    longest_generation_token_count=5,
    selected_call_ids=["c22", "c1"],
    calls=[
        receipt_pb2.ReceiptCall(call_id="c1", digest=b"\x11" * 32, selected=True),
        receipt_pb2.ReceiptCall(
            call_id="c22", digest=b"\x22" * 32, selected=True, parent_call_id="c1"
        ),
    ],
)
FOREST_LAYOUT = (
    b"callforest-receipt-v2"
    b"\x00\x00\x00\x00\x00\x00\x00\x02g1"
    b"\x00\x00\x00\x00\x00\x00\x00\x04roll"
    b"\x00\x00\x00\x00\x00\x00\x00\x03"
    b"\x00\x00\x00\x00\x00\x00\x00\x07roll-a2"
    b"\x00\x00\x00\x00\x00\x00\x00\x03"
    b"\x00\x00\x00\x00\x00\x00\x01\x02"
    b"\xbf\xf8\x00\x00\x00\x00\x00\x00"
    b"\x00" + bytes(8) + b"\x01\x00\x00\x00\x00\x00\x00\x00\x03c22"
    b"\x00\x00\x00\x00\x00\x00\x00\x07content"
    b"\x01"
    b"\x02"
    b"\x00\x00\x00\x00\x00\x00\x00\x0call_captured"
    b"\x01"
    b"\x00\x00\x00\x00\x00\x00\x00\x07"
    b"\x00\x00\x00\x00\x00\x00\x01\x02"
    b"\x00\x00\x00\x00\x00\x00\x00\x05"
    b"\x00\x00\x00\x00\x00\x00\x00\x02"
    b"\x00\x00\x00\x00\x00\x00\x00\x03c22"
    b"\x00\x00\x00\x00\x00\x00\x00\x02c1"
    b"\x00\x00\x00\x00\x00\x00\x00\x02"
    b"\x00\x00\x00\x00\x00\x00\x00\x02c1" + b"\x11" * 32 + b"\x01\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x03c22" + b"\x22" * 32 + b"\x01"
    b"\x01\x00\x00\x00\x00\x00\x00\x00\x02c1"
)


@pytest.mark.requirement("SEC-3")
def test_the_layout_of_forest_mode_is_the_written_one() -> None:
    assert receipt_digest(FOREST) == hashlib.sha256(FOREST_LAYOUT).digest()


@pytest.mark.requirement("SEC-3")
@pytest.mark.parametrize(
    "change",
    [
        {"selection_policy": "explicit"},
        {"environment_masked": False},
        {"generated_token_count": 8},
        {"total_token_count": 259},
        {"longest_generation_token_count": 6},
        {"mode": attempt_pb2.CAPTURE_MODE_CHAIN},
    ],
)
def test_every_field_of_forest_mode_changes_it(change: dict[str, object]) -> None:
    changed = receipt_pb2.Receipt()
    changed.CopyFrom(FOREST)
    for name, value in change.items():
        setattr(changed, name, value)
    assert receipt_digest(changed) != receipt_digest(FOREST)


@pytest.mark.requirement("SEC-3", "FIN-8")
def test_a_salvaged_receipt_has_a_layout_of_its_own() -> None:
    salvaged = receipt_pb2.Receipt()
    salvaged.CopyFrom(FOREST)
    salvaged.salvaged_from = "pending_call"
    selected = b"\x00\x00\x00\x00\x00\x00\x00\x03c22\x00\x00\x00\x00\x00\x00\x00\x02c1"
    assert FOREST_LAYOUT.count(selected) == 1
    before, behind = FOREST_LAYOUT.replace(b"receipt-v2", b"receipt-v3").split(selected)
    named = b"\x00\x00\x00\x00\x00\x00\x00\x0cpending_call"
    layout = before + selected + named + behind
    assert receipt_digest(salvaged) == hashlib.sha256(layout).digest()


@pytest.mark.requirement("SEC-3")
def test_selection_order_and_parents_are_covered_in_forest_mode_alone() -> None:
    swapped, orphaned, explained = (receipt_pb2.Receipt() for _ in range(3))
    for each in (swapped, orphaned, explained):
        each.CopyFrom(FOREST)
    swapped.selected_call_ids.reverse()
    orphaned.calls[1].ClearField("parent_call_id")
    explained.calls[0].reason = "selected"
    assert len({receipt_digest(each) for each in (FOREST, swapped, orphaned)}) == 3
    assert receipt_digest(explained) == receipt_digest(FOREST)
    chain = receipt_pb2.Receipt()
    chain.CopyFrom(FULL)
    chain.mode = attempt_pb2.CAPTURE_MODE_CHAIN
    chain.calls[1].parent_call_id, chain.generated_token_count = "c1", 9
    assert receipt_digest(chain) == receipt_digest(FULL)


RESTORED_OF_1 = (
    b"callforest-receipt-v4\x01"
    + FULL_LAYOUT.removeprefix(b"callforest-receipt-v1").split(b"\x11" * 32)[0]
    + b"\x11" * 32
    + b"\x01\x01\x00\x00\x00\x00\x00\x00\x00\x04roll"
    + b"\x00\x00\x00\x00\x00\x00\x00\x03c22"
    + b"\x22" * 32
    + b"\x00\x00"
)


def restored(base: receipt_pb2.Receipt, source: str = "roll") -> receipt_pb2.Receipt:
    """The receipt with its first call restored from an earlier attempt."""
    receipt = receipt_pb2.Receipt()
    receipt.CopyFrom(base)
    receipt.calls[0].source_capture_key = source
    return receipt


@pytest.mark.requirement("ADM-9", "TRN-12")
def test_a_receipt_with_a_restored_call_has_a_layout_around_its_own() -> None:
    assert receipt_digest(restored(FULL)) == hashlib.sha256(RESTORED_OF_1).digest()
    head, tail = FOREST_LAYOUT.removeprefix(b"callforest-receipt-v2").split(b"\x11" * 32)
    for number, extra in ((2, b""), (3, b"\x00\x00\x00\x00\x00\x00\x00\x0cpending_call")):
        receipt = restored(FOREST)
        calls = b"\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x02c1"
        before = head.removesuffix(calls)
        assert before != head
        if extra:
            receipt.salvaged_from = "pending_call"
        layout = b"".join(
            (
                b"callforest-receipt-v4",
                bytes([number]),
                before,
                extra,
                calls,
                b"\x11" * 32,
                b"\x01\x00\x01\x00\x00\x00\x00\x00\x00\x00\x04roll",
                tail.removeprefix(b"\x01\x00"),
                b"\x00",
            )
        )
        assert receipt_digest(receipt) == hashlib.sha256(layout).digest()


@pytest.mark.requirement("ADM-9", "SEC-3")
def test_the_owner_of_a_call_is_covered() -> None:
    moved = restored(FULL)
    moved.calls[0].source_capture_key = ""
    moved.calls[1].source_capture_key = "roll"
    receipts = (FULL, restored(FULL), restored(FULL, "roll-a1"), moved)
    assert len({receipt_digest(each) for each in receipts}) == 4
