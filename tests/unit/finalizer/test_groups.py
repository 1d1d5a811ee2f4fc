"""What the core decides of one group: layout, drops, the delivered batch."""

from dataclasses import replace

import pytest

from callforest.capture.v1 import group_batch_pb2, receipt_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import StagedCall
from callforest_mesh.finalizer import groups
from callforest_mesh.finalizer.service import FinalizerOptions
from tests.unit.custody.chains import KEY
from tests.unit.finalizer.rollouts import finalized, message, two_turns


def log(*rollouts: row_log_pb2.FinalizedRollout, **options: object) -> row_log_pb2.LoggedGroup:
    settings = {"row_multiple": 1, "abandon_reason": ""} | options
    return groups.log_group("g", rollouts, **settings)


@pytest.mark.requirement("FIN-2", "FIN-4")
def test_a_group_is_logged_by_reference_with_its_row_ids() -> None:
    logged = log(finalized(0), finalized(1, masked=True), row_multiple=4)
    assert list(logged.rollout_ids) == ["r0", "r1"]
    assert [row.row_id for row in logged.rows] == ["g_g0_s0", "g_g1_s0", "g_pad0", "g_pad1"]
    assert [row.kind for row in logged.rows] == [
        group_batch_pb2.ROW_KIND_TRAINING,
        group_batch_pb2.ROW_KIND_PLACEHOLDER,
        group_batch_pb2.ROW_KIND_PADDING,
        group_batch_pb2.ROW_KIND_PADDING,
    ]
    assert [row.HasField("slot") for row in logged.rows] == [True, True, False, False]
    assert [(part.capture_key, part.call_id, part.digest) for part in logged.segments] == [
        ("r0", "a", bytes(32)),
        ("r0", "b", bytes(32)),
    ]
    assert [span.owns_loss for row in logged.rows for span in row.spans] == [True] * 2 + [False] * 6
    assert (logged.drop_reason, logged.cursor, logged.row_multiple) == ("", 0, 4)


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize(
    ("stages", "fraction"),
    [
        (["heuristic", "declared", "content", "heuristic"], 0.5),
        (["declared"], 0.0),
        (["heuristic"], 1.0),
    ],
)
def test_the_heuristic_fraction_is_of_the_logical_rollouts(
    stages: list[str], fraction: float
) -> None:
    rollouts = [finalized(slot, stage=stage) for slot, stage in enumerate(stages)]
    assert log(*rollouts).heuristic_fraction == fraction
    assert log(*rollouts, abandon_reason="late").heuristic_fraction == fraction


@pytest.mark.requirement("FIN-4")
def test_a_group_without_a_valid_rollout_is_dropped() -> None:
    logged = log(finalized(0, masked=True), finalized(1, masked=True), row_multiple=4)
    assert (logged.drop_reason, len(logged.rows), len(logged.segments)) == ("no_valid_layout", 0, 0)
    assert list(logged.rollout_ids) == ["r0", "r1"]


@pytest.mark.requirement("FIN-5")
@pytest.mark.parametrize(
    ("masks", "dropped"),
    [
        (["", ""], ""),
        (["", "pending_call"], ""),
        (["", "pending_call", "pending_call"], "below_min_valid_fraction"),
        (["", "environment_masked", "pending_call"], ""),
        (["pending_call"], "below_min_valid_fraction"),
        (["environment_masked"], "no_valid_layout"),
    ],
)
def test_a_group_needs_its_part_of_verified_rollouts(masks: list[str], dropped: str) -> None:
    """Each logical rollout counts once; the environment's masks are no failures of capture."""
    rollouts = [finalized(slot, masked=bool(mask)) for slot, mask in enumerate(masks)]
    for rollout, mask in zip(rollouts, masks, strict=True):
        rollout.receipt.mask_reason = mask
        rollout.receipt.generated_token_count = 3 * (mask in ("", "environment_masked"))
    assert log(*rollouts, min_valid_fraction=0.5).drop_reason == dropped
    for rollout in rollouts:
        rollout.receipt.generated_token_count = 0
    unverified = [one for one in masks if one]
    lost = log(*rollouts, min_valid_fraction=0.5).drop_reason != ""
    assert lost == (2 * len(unverified) > len(masks)), "what was not verified counts as such"
    assert log(*rollouts).drop_reason in ("", "no_valid_layout")
    late = log(*rollouts, min_valid_fraction=0.5, abandon_reason="late")
    assert late.drop_reason == "late"


def test_an_abandoned_group_is_dropped_as_it_is() -> None:
    assert log(finalized(0), abandon_reason="agent lost").drop_reason == "agent lost"
    assert log(abandon_reason="nobody came").drop_reason == "nobody came"


def of_size(slot: int, *sizes: int) -> row_log_pb2.FinalizedRollout:
    """A finalized rollout whose calls have these sizes."""
    return finalized(slot, path_bytes=sum(sizes), call_bytes=sizes)


@pytest.mark.requirement("FIN-3")
def test_a_group_of_any_size_is_published_and_says_whether_it_comes_in_parts() -> None:
    limit = groups.WHOLE_BYTES_MAX
    whole = log(of_size(0, limit - 4096, 1))
    assert (whole.drop_reason, groups.comes_in_parts(whole)) == ("", False)
    largest = 48 << 20
    parted = log(*(of_size(slot, largest, largest) for slot in range(256)))
    assert (parted.drop_reason, groups.comes_in_parts(parted)) == ("", True)
    assert parted.size_bytes > 24 << 30
    assert [part.size_bytes for part in parted.segments] == [largest] * 512
    assert parted.ByteSize() < 256 << 10, "references alone become visible"


def test_what_an_earlier_release_finalized_has_no_sizes_of_calls() -> None:
    logged = log(finalized(0, path_bytes=groups.WHOLE_BYTES_MAX))
    assert [part.size_bytes for part in logged.segments] == [0, 0]
    assert groups.comes_in_parts(logged)


def test_what_an_earlier_release_published_is_whole() -> None:
    logged = log(finalized(0))
    logged.ClearField("size_bytes")
    assert not groups.comes_in_parts(logged)


def test_a_group_is_dropped_only_when_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that no part holds, or references that no record holds."""
    largest = groups.CALL_BYTES_MAX
    assert log(of_size(0, largest, 1)).drop_reason == ""
    too_large = log(of_size(0, 1, largest + 1), of_size(1, 1, 1))
    assert (too_large.drop_reason, len(too_large.rows)) == ("group_too_large", 0)
    assert not groups.comes_in_parts(too_large)
    monkeypatch.setattr(groups, "REFERENCES_BYTES_MAX", log(finalized(0)).ByteSize())
    assert log(finalized(0)).drop_reason == ""
    assert log(finalized(0), finalized(1)).drop_reason == "group_too_large"


def crowded(slot: int) -> row_log_pb2.FinalizedRollout:
    """A rollout with so many calls that three receipts of its kind fill a batch."""
    rollout = finalized(slot)
    call = receipt_pb2.ReceiptCall(call_id="c" * 128, digest=bytes(32))
    rollout.receipt.calls.extend([call] * 130_000)
    return rollout


@pytest.mark.requirement("FIN-4")
@pytest.mark.parametrize("selected", [0, 160_000])
def test_receipts_count_too_and_a_dropped_group_can_always_be_delivered(selected: int) -> None:
    rollouts = [crowded(slot) for slot in range(3)]
    assert groups.comes_in_parts(log(*rollouts))
    for rollout in rollouts:
        rollout.receipt.selected_call_ids.extend(["c" * 128] * selected)
    logged = log(*rollouts, abandon_reason="late")
    assert not groups.comes_in_parts(logged)
    batch = groups.make_batch(logged, [one.receipt for one in rollouts], ())
    assert batch.ByteSize() < groups.WHOLE_BYTES_MAX
    assert [receipt.rollout_id for receipt in batch.receipts] == ["r0", "r1", "r2"]
    assert all(one.receipt.calls for one in rollouts), "what is stored keeps its calls"
    few = groups.make_batch(logged, [rollouts[0].receipt], ())
    assert list(few.receipts) == [rollouts[0].receipt], "nothing is lost that has room"


def test_a_position_keeps_its_place_when_it_is_dropped() -> None:
    logged = log(finalized(0), finalized(1, stage="heuristic"))
    logged.cursor = 7
    lost = groups.dropped(logged, "staged_call_missing: r0/a")
    assert (lost.cursor, lost.group_id, list(lost.rollout_ids)) == (7, "g", ["r0", "r1"])
    assert (lost.drop_reason, len(lost.rows), len(lost.segments)) == (
        "staged_call_missing: r0/a",
        0,
        0,
    )
    assert lost.heuristic_fraction == 0.5


def references(calls: list[StagedCall]) -> row_log_pb2.LoggedGroup:
    logged = row_log_pb2.LoggedGroup()
    for call in calls:
        logged.segments.add(capture_key=KEY, call_id=call.identity.call_id, digest=call.digest)
    return logged


@pytest.mark.bugcase("B20")
def test_what_is_delivered_is_proven_to_be_what_was_verified() -> None:
    calls = two_turns().staged()
    logged = references(calls)
    assert groups.altered_call(logged.segments, calls) is None
    first, second = calls
    flipped = second.token_ids.copy()
    flipped[-1] ^= 1
    louder = second.logprobs.copy()
    louder[0] += 1
    damages = [
        replace(second, token_ids=flipped),
        replace(second, logprobs=louder),
        replace(second, extras=b"B\x01"),
        replace(second, weight_version=second.weight_version + 1),
        replace(second, carry_len=second.carry_len + 1),
        replace(second, digest=first.digest),
        first,
    ]
    for damaged in damages:
        altered = groups.altered_call(logged.segments, [first, damaged])
        assert altered is not None
        assert altered.call_id == "c2"


def test_the_batch_has_what_the_log_says() -> None:
    calls = two_turns().staged()
    logged = log(finalized(0))
    logged.cursor = 4
    batch = groups.make_batch(logged, [finalized(0).receipt], [message(call) for call in calls])
    assert (batch.cursor, batch.group_id, batch.row_multiple) == (4, "g", 1)
    assert list(batch.rows) == list(logged.rows)
    assert [call.call_id for call in batch.segments] == ["c1", "c2"]
    assert list(batch.receipts) == [finalized(0).receipt]


@pytest.mark.parametrize("multiple", [0, -1, 4097])
def test_a_multiple_that_no_group_can_have_is_refused(multiple: int, tmp_path) -> None:
    with pytest.raises(ValueError, match="row_multiple"):
        FinalizerOptions(tmp_path, row_multiple=multiple)
