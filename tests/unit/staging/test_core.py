"""What Staging decides, without a store."""

from collections.abc import Callable

import numpy as np
import pytest

from callforest.capture.v1 import capture_admission_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.codec import coords_of
from callforest_core.refusal import Refusal
from callforest_mesh.staging.core import (
    CHAIN_CALLS_MAX,
    CallLink,
    PrefixPlan,
    StagedName,
    check_call,
    check_store,
    plan_prefix,
    receipt_of,
)
from callforest_mesh.staging.entry import CallEntry
from tests.unit.staging.calls import KEY, Chain

Edit = Callable[[staged_call_pb2.StagedCall], None]


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def edit_ids(call: staged_call_pb2.StagedCall) -> None:
    call.canonical.token_ids = flipped(call.canonical.token_ids)


def edit_logprobs(call: staged_call_pb2.StagedCall) -> None:
    call.canonical.logprobs = flipped(call.canonical.logprobs)


def move_carry(call: staged_call_pb2.StagedCall) -> None:
    call.canonical.carry_token_count -= 1
    call.canonical.logprobs += bytes(4)


def set_field(name: str, value: object) -> Edit:
    return lambda call: setattr(call, name, value)


def flip_field(name: str) -> Edit:
    return lambda call: setattr(call, name, flipped(getattr(call, name)))


EDITS: list[tuple[Edit, str, str]] = [
    (edit_ids, "chain_hash", "digest"),
    (edit_logprobs, "digest", "digest"),
    (move_carry, "digest", "digest"),
    (set_field("capture_key", "rollout-2"), "digest", "digest"),
    (set_field("call_id", "call-9"), "digest", "digest"),
    (set_field("weight_version", 4), "digest", "digest"),
    (set_field("extras", b"D" + bytes(8)), "extras_digest", "extras_digest"),
    (flip_field("digest"), "digest", "digest"),
    (flip_field("extras_digest"), "extras_digest", "extras_digest"),
    (flip_field("chain_hash"), "chain_hash", "digest"),
    (flip_field("cumulative_hash"), "cumulative_hash", "digest"),
]


def test_honest_calls_pass() -> None:
    chain = Chain()
    for _ in range(3):
        check_call(chain.add())


@pytest.mark.requirement("CAP-6")
@pytest.mark.parametrize(("edit", "root_field", "child_field"), EDITS)
def test_a_call_that_is_not_what_it_says_is_refused(
    edit: Edit, root_field: str, child_field: str
) -> None:
    chain = Chain()
    for field in (root_field, child_field):
        call = chain.add()
        edit(call)
        with pytest.raises(Refusal) as refused:
            check_call(call)
        assert refused.value.reason == er.ERROR_REASON_DIGEST_MISMATCH
        assert refused.value.facts == {
            "capture_key": call.capture_key,
            "call_id": call.call_id,
            "field": field,
        }


@pytest.mark.parametrize(("name", "value"), [("parent_call_id", "call-7"), ("prev_token_count", 9)])
def test_a_lineage_that_was_changed_is_refused(name: str, value: object) -> None:
    chain = Chain()
    chain.add()
    call = chain.add()
    setattr(call, name, value)
    with pytest.raises(Refusal, match="digest"):
        check_call(call)


@pytest.mark.bugcase("B10")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logprobs_that_are_not_finite_are_refused(value: float) -> None:
    call = Chain().add()
    logprobs = np.frombuffer(call.canonical.logprobs, dtype="<f4").copy()
    logprobs[-1] = value
    call.canonical.logprobs = logprobs.tobytes()
    with pytest.raises(Refusal) as refused:
        check_call(call)
    assert refused.value.reason == er.ERROR_REASON_INVALID_MESSAGE
    assert refused.value.violations == (("canonical.logprobs", "must be finite"),)


def test_the_first_of_two_generations_wins() -> None:
    first, second = Chain(seed=1).add(), Chain(seed=2).add()
    assert receipt_of(first, None) == pb.StagedReceipt(coords=coords_of(first))
    assert receipt_of(first, first) == pb.StagedReceipt(coords=coords_of(first))
    receipt = receipt_of(second, first)
    assert receipt.coords == coords_of(first)
    assert receipt.winner.served_response == first.served_response
    assert receipt.winner.completion == first.completion


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("field", ["served_response", "completion", "decision"])
def test_another_response_completion_or_decision_is_another_generation(field: str) -> None:
    first, second = Chain().add(), Chain().add()
    for call in (first, second):
        call.decision.input = capture_admission_pb2.CAPTURE_INPUT_ROOT
    if field == "served_response":
        second.served_response = b"{}"
    elif field == "completion":
        second.completion.finish_reason = "length"
    else:
        second.decision.reason = "boundary_not_found"
    assert second.digest == first.digest
    winner = receipt_of(second, first).winner
    assert (winner.served_response, winner.completion, winner.decision) == (
        first.served_response,
        first.completion,
        first.decision,
    )
    first.ClearField("decision")
    assert not receipt_of(second, first).winner.HasField("decision")


def links_of(*calls: tuple[str, str | None, int, int]) -> Callable[[StagedName], CallLink | None]:
    links = {
        StagedName(KEY, call_id): CallLink(parent, prev, delta)
        for call_id, parent, prev, delta in calls
    }
    return links.get


def ids_of(plan: PrefixPlan) -> tuple[str, ...]:
    return tuple(name.call_id for name in plan.names)


THREE = (("a", None, 0, 2), ("b", "a", 2, 3), ("c", "b", 5, 4))


def query(call_id: str = "c") -> pb.PrefixQuery:
    return pb.PrefixQuery(capture_key=KEY, call_id=call_id)


@pytest.mark.parametrize(
    ("held", "held_call_id", "call_ids"),
    [
        ((), None, ("a", "b", "c")),
        (("a",), "a", ("b", "c")),
        (("a", "b"), "b", ("c",)),
        (("c", "a"), "c", ()),
        (("unknown",), None, ("a", "b", "c")),
    ],
)
def test_a_prefix_starts_behind_the_nearest_held_call(
    held: tuple[str, ...], held_call_id: str | None, call_ids: tuple[str, ...]
) -> None:
    plan = plan_prefix(links_of(*THREE), query(), held)
    assert (plan.held_call_id, ids_of(plan)) == (held_call_id, call_ids)


def test_a_held_call_may_be_gone() -> None:
    plan = plan_prefix(links_of(*THREE[1:]), query(), {"a"})
    assert (plan.held_call_id, ids_of(plan)) == ("a", ("b", "c"))


@pytest.mark.parametrize(
    ("calls", "held", "missing"),
    [
        (THREE[1:], (), "a"),
        ((THREE[0], THREE[2]), (), "b"),
        ((("a", None, 0, 3), *THREE[1:]), (), "a"),
        ((("a", None, 0, 3), *THREE[1:]), ("a",), "a"),
        ((("a", None, 1, 1), *THREE[1:]), (), None),
        ((("a", "z", 0, 2), *THREE[1:]), (), "z"),
        ((("a", "c", 7, 2), ("b", "a", 9, 3), ("c", "b", 12, 4)), (), "c"),
    ],
)
def test_ancestors_that_do_not_fit_break_the_prefix(
    calls: tuple[tuple[str, str | None, int, int], ...], held: tuple[str, ...], missing: str | None
) -> None:
    with pytest.raises(Refusal) as refused:
        plan_prefix(links_of(*calls), query(), held)
    assert refused.value.reason == er.ERROR_REASON_PREFIX_BROKEN
    assert refused.value.facts["call_id"] == "c"
    assert refused.value.facts.get("missing_call_id") == missing


def test_an_unknown_call_has_no_prefix() -> None:
    with pytest.raises(Refusal) as refused:
        plan_prefix(links_of(*THREE), query("d"), ())
    assert refused.value.reason == er.ERROR_REASON_CALL_NOT_FOUND


def test_a_chain_is_bounded() -> None:
    def find(name: StagedName) -> CallLink:
        number = int(name.call_id)
        return CallLink(str(number - 1) if number else None, number, 1)

    longest = plan_prefix(find, query(str(CHAIN_CALLS_MAX - 1)), ())
    assert len(longest.names) == CHAIN_CALLS_MAX
    with pytest.raises(Refusal, match="longer than"):
        plan_prefix(find, query(str(CHAIN_CALLS_MAX)), ())


def test_a_prefix_fits_one_payload() -> None:
    with pytest.raises(Refusal) as refused:
        plan_prefix(links_of(("c", None, 0, 2**24)), query(), ())
    assert refused.value.reason == er.ERROR_REASON_MESSAGE_TOO_LARGE
    assert refused.value.facts["use_method"] == "Fetch"


FIRST, SECOND, THIRD = "r1", "r1-a1", "r1-a2"
RESTORED = {
    StagedName(FIRST, "a"): CallLink(None, 0, 2),
    StagedName(FIRST, "b"): CallLink("a", 2, 3),
    StagedName(SECOND, "c"): CallLink("b", 5, 4, FIRST),
    StagedName(THIRD, "d"): CallLink("c", 9, 1, SECOND),
    StagedName(THIRD, "a"): CallLink("d", 10, 1),
    StagedName(THIRD, "e"): CallLink("a", 11, 1),
}
LAST = pb.PrefixQuery(capture_key=THIRD, call_id="e")


@pytest.mark.requirement("ADM-9", "TRN-12")
@pytest.mark.parametrize(
    ("held", "held_call_id", "size"),
    [((), None, 6), (("d",), "d", 2), (("a",), "a", 1), (("b", "c"), None, 6)],
)
def test_a_prefix_goes_on_in_earlier_attempts(
    held: tuple[str, ...], held_call_id: str | None, size: int
) -> None:
    """What is held is of the queried attempt: `a` of the first attempt is another call."""
    plan = plan_prefix(RESTORED.get, LAST, held)
    assert plan.held_call_id == held_call_id
    assert plan.names == tuple(RESTORED)[6 - size :]


@pytest.mark.requirement("ADM-9")
@pytest.mark.parametrize("lost", list(RESTORED)[:4])
def test_a_dropped_owner_breaks_the_prefix(lost: StagedName) -> None:
    links = {name: link for name, link in RESTORED.items() if name != lost}
    with pytest.raises(Refusal) as refused:
        plan_prefix(links.get, LAST, ())
    assert refused.value.reason == er.ERROR_REASON_PREFIX_BROKEN
    assert refused.value.facts["missing_call_id"] == lost.call_id
    if lost.capture_key != THIRD:
        assert f"under {lost.capture_key}" in refused.value.message


@pytest.mark.requirement("ADM-9")
def test_the_owner_of_a_parent_must_be_an_earlier_attempt() -> None:
    chain = Chain(SECOND)
    root, behind = chain.add(), chain.add()
    behind.parent_capture_key = FIRST
    check_call(behind)  # no digest covers it
    root.parent_capture_key = FIRST
    with pytest.raises(Refusal) as refused:
        check_call(root)
    assert refused.value.reason == er.ERROR_REASON_INVALID_MESSAGE
    for owner in (SECOND, THIRD, "r2"):
        behind.parent_capture_key = owner
        with pytest.raises(Refusal) as refused:
            check_call(behind)
        assert [field for field, _ in refused.value.violations] == ["parent_capture_key"]


@pytest.mark.requirement("ADM-9")
def test_the_same_call_behind_another_owner_is_another() -> None:
    chain = Chain(SECOND)
    chain.add()
    first = chain.add()
    second = type(first).FromString(first.SerializeToString())
    second.parent_capture_key = FIRST
    receipt = receipt_of(second, first)
    assert receipt.HasField("winner")
    assert receipt.coords.parent_capture_key == ""
    assert receipt_of(second, second).coords.parent_capture_key == FIRST


@pytest.mark.requirement("ADM-9")
def test_an_index_entry_ends_with_the_owner_of_the_parent_if_that_is_another() -> None:
    def entry(link: CallLink) -> CallEntry:
        return CallEntry(1, 2, 3, b"\x07" * 16, link)

    head = bytes.fromhex("0000000000000001 00000002 00000003 0000000000000005 00000004")
    head += b"\x07" * 16
    for link, tail in (
        (CallLink(None, 5, 4), b""),
        (CallLink("b", 5, 4), b"b"),
        (CallLink("b", 5, 4, FIRST), b"b\0r1"),
    ):
        assert entry(link).to_bytes() == head + tail
        assert CallEntry.from_bytes(head + tail) == entry(link)


@pytest.mark.requirement("LED-4")
@pytest.mark.parametrize("store", ["memory", "redis", "", "LMDB"])
def test_only_durable_stores_are_accepted(store: str) -> None:
    check_store("lmdb")
    with pytest.raises(Refusal) as refused:
        check_store(store)
    assert refused.value.reason == er.ERROR_REASON_VOLATILE_STORE
