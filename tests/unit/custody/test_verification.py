"""Verification: honest attempts give rows, every broken one its code and its call (FOR-4)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.digests import FormatVersions, canonical_call_digest, digest_opening
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.tokens import encode_floats, encode_ids
from callforest_core.custody.verification import (
    PathError,
    VerificationError,
    _check_lineage,
    verify_and_linearize,
    verify_paths,
)
from tests.unit.custody.chains import KEY, Attempt, Turn, branching, receipt_of

ZERO = bytes(32)


def sealed(call: StagedCall, **changes: Any) -> StagedCall:
    """The call with changes and a digest that fits them, as a forger would make it."""
    changed = replace(call, **changes)
    digest = canonical_call_digest(
        digest_opening(changed.identity.capture_key),
        changed.identity.call_id,
        changed.identity.parent_call_id,
        changed.prev_len,
        changed.carry_len,
        changed.weight_version,
        encode_ids(changed.token_ids),
        encode_floats(changed.logprobs),
        (changed.extras_digest, changed.chain_hash, changed.cumulative_hash),
    )
    return replace(changed, digest=digest)


def forged(call_id: str, **changes: Any) -> tuple[Receipt, list[StagedCall]]:
    """The branching attempt with one call changed in the store and in the ledger alike."""
    return forged_each(**{call_id: changes})


def with_record(position: int, **changes: Any) -> tuple[Receipt, list[StagedCall]]:
    """The branching attempt with one ledger row changed."""
    attempt = branching()
    receipt = attempt.receipt("c4")
    rows = list(receipt.manifest)
    rows[position] = replace(rows[position], **changes)
    return replace(receipt, manifest=tuple(rows)), attempt.staged()


def exact_call(call: StagedCall, mask: Sequence[float], logprobs: Sequence[float]) -> ExactCall:
    """The call in the contract's full form with a mask and logprobs of its own, sealed."""
    made = ExactCall(
        call.identity,
        call.mode,
        call.prev_len,
        call.delta_len,
        call.cum_len,
        call.weight_version,
        call.token_ids.astype(np.uint64),
        np.array(mask),
        np.array(logprobs),
        ZERO,
        call.extras_digest,
        call.chain_hash,
        call.cumulative_hash,
    )
    return replace(made, digest=made.recompute_digest())


def as_exact(
    attempt: Attempt, call_id: str, mask: Sequence[float]
) -> tuple[Receipt, list[ExactCall]]:
    """The attempt in full form, one call's mask replaced."""
    receipt = attempt.receipt("c4")
    calls: list[ExactCall] = []
    rows: list[CallRecord] = []
    for call, row in zip(attempt.staged(), receipt.manifest, strict=True):
        own = [0.0] * call.carry_len + [1.0] * call.generation_len
        chosen = list(mask) if call.identity.call_id == call_id else own
        made = exact_call(call, chosen, [-0.5 if value else 0.0 for value in chosen])
        calls.append(made)
        rows.append(replace(row, digest=made.digest))
    return replace(receipt, manifest=tuple(rows)), calls


@pytest.mark.requirement("FOR-4")
def test_the_row_is_the_path_to_the_terminal() -> None:
    attempt = branching()
    row = verify_and_linearize(attempt.receipt("c4"), attempt.staged())
    assert row.capture_key == KEY
    assert row.call_ids == ("c1", "c3", "c4")
    assert row.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 14, 7, 8, 16, 17, 18]
    assert row.token_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1]
    assert row.logprobs.tolist() == [0, 0, 0, -0.25, -0.5, 0, -0.25, 0, 0, -0.25, -0.5, -0.75]
    assert row.prompt_len == 3
    assert row.weight_versions == (7, 8, 9)
    assert [(link.start, link.end, link.carry_len, link.generation_len) for link in row.links] == [
        (0, 5, 3, 2),
        (5, 7, 1, 1),
        (7, 12, 2, 3),
    ]


@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize(
    ("terminal", "calls"), [("c1", ("c1",)), ("c2", ("c1", "c2")), ("r", ("r",))]
)
def test_the_terminal_may_be_interior_a_dead_branch_or_another_root(
    terminal: str, calls: tuple[str, ...]
) -> None:
    attempt = branching()
    assert verify_and_linearize(attempt.receipt(terminal), attempt.staged()).call_ids == calls


Breakage = Callable[[], tuple[Receipt, Sequence[StagedCall | ExactCall]]]


def tampered(position: int, **changes: Any) -> tuple[Receipt, list[StagedCall]]:
    """The branching attempt with one staged call changed under its old digest."""
    attempt = branching()
    calls = attempt.staged()
    calls[position] = replace(calls[position], **changes)
    return attempt.receipt("c4"), calls


def receipt_with(**changes: Any) -> tuple[Receipt, list[StagedCall]]:
    attempt = branching()
    return replace(attempt.receipt("c4"), **changes), attempt.staged()


def chosen(*positions: int) -> tuple[Receipt, list[StagedCall]]:
    """The branching attempt with its staged calls picked by position."""
    attempt = branching()
    calls = attempt.staged()
    return attempt.receipt("c4"), [calls[position] for position in positions]


def without(call_id: str) -> tuple[Receipt, list[StagedCall]]:
    attempt = branching()
    calls = [call for call in attempt.staged() if call.identity.call_id != call_id]
    return receipt_of(calls, "c4"), calls


def repeated_row() -> tuple[Receipt, list[StagedCall]]:
    attempt = branching()
    receipt, calls = attempt.receipt("c4"), attempt.staged()
    return replace(receipt, manifest=(*receipt.manifest, receipt.manifest[0])), [*calls, calls[0]]


def stranger() -> tuple[Receipt, list[StagedCall]]:
    attempt = branching()
    calls = attempt.staged()
    calls[1] = sealed(calls[1], identity=CallIdentity(KEY, "unknown", "c1"))
    return attempt.receipt("c4"), calls


UNSAMPLED: dict[str, Any] = {"carry_len": 2, "logprobs": np.empty(0, np.float32)}


def forged_each(**changes: dict[str, Any]) -> tuple[Receipt, list[StagedCall]]:
    """The branching attempt with some calls changed, each digested again."""
    attempt = branching()
    for call_id, change in changes.items():
        attempt.calls[call_id] = sealed(attempt.calls[call_id], **change)
    return attempt.receipt("c4"), attempt.staged()


def cycle() -> tuple[Receipt, list[StagedCall]]:
    """c1 claims to continue c3, which continues c1; the lengths of c1's claim fit."""
    attempt = branching()
    attempt.calls["c1"] = sealed(
        attempt.calls["c1"],
        identity=CallIdentity(KEY, "c1", "c3"),
        prev_len=attempt.calls["c3"].cum_len,
    )
    return attempt.receipt("c4"), attempt.staged()


@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize(
    ("code", "call_id", "breakage"),
    [
        ("unsupported_schema", None, lambda: receipt_with(versions=FormatVersions(3, 2, 1))),
        ("unsupported_digest", None, lambda: receipt_with(versions=FormatVersions(2, 1, 1))),
        ("unsupported_extras_digest", None, lambda: receipt_with(versions=FormatVersions(2, 2, 2))),
        ("rollout_failed", None, lambda: receipt_with(failure_reason="x", capture_poisoned=True)),
        ("capture_poisoned", None, lambda: receipt_with(capture_poisoned=True)),
        ("empty_manifest", None, lambda: receipt_with(manifest=())),
        ("duplicate_manifest_row", "c1", repeated_row),
        ("duplicate_staging_key", "c3", lambda: with_record(2, staging_key=f"{KEY}/c1")),
        ("row_count_mismatch", None, lambda: chosen(0, 1, 2, 3)),
        ("row_count_mismatch", None, lambda: chosen(0, 1, 2, 3, 4, 4)),
        ("duplicate_snapshot", "c1", lambda: chosen(0, 0, 2, 3, 4)),
        ("snapshot_identity_mismatch", "unknown", stranger),
        ("snapshot_order_mismatch", "c3", lambda: chosen(0, 2, 1, 3, 4)),
        ("wrong_rollout", "c1", lambda: tampered(0, identity=CallIdentity("other", "c1", None))),
        ("wrong_parent_call_id", "c3", lambda: with_record(2, parent_call_id="c2")),
        ("wrong_mode", "c3", lambda: with_record(2, mode="text")),
        ("wrong_prev_len", "c3", lambda: with_record(2, prev_len=4)),
        ("wrong_delta_len", "c3", lambda: with_record(2, delta_len=4)),
        ("wrong_cum_len", "c3", lambda: with_record(2, cum_len=4)),
        ("wrong_weight_version", "c3", lambda: with_record(2, weight_version=4)),
        ("wrong_digest", "c3", lambda: with_record(2, digest=ZERO)),
        ("wrong_extras_digest", "c3", lambda: with_record(2, extras_digest=ZERO)),
        ("wrong_chain_hash", "c3", lambda: with_record(2, chain_hash=ZERO)),
        ("wrong_cumulative_hash", "c3", lambda: with_record(2, cumulative_hash=ZERO)),
        ("wrong_schema_version", "c3", lambda: with_record(2, versions=FormatVersions(3, 2, 1))),
        ("wrong_digest_version", "c3", lambda: with_record(2, versions=FormatVersions(2, 3, 1))),
        (
            "wrong_extras_digest_version",
            "c3",
            lambda: with_record(2, versions=FormatVersions(2, 2, 2)),
        ),
        ("invalid_snapshot", "c1", lambda: tampered(0, carry_len=4)),
        ("invalid_snapshot", "c1", lambda: tampered(0, carry_len=-1)),
        (
            "invalid_snapshot",
            "c3",
            lambda: forged("c3", logprobs=np.array([np.nan], np.float32)),
        ),
        ("corrupt_digest", "c2", lambda: tampered(1, logprobs=np.array([-9, -9], np.float32))),
        ("missing_parent", "c2", lambda: without("c1")),
        ("parent_length_mismatch", "c3", lambda: forged("c3", prev_len=6)),
        ("lineage_cycle", "c1", cycle),
        ("missing_terminal", None, lambda: receipt_with(terminal_call_id=None)),
        ("missing_terminal", "gone", lambda: receipt_with(terminal_call_id="gone")),
        ("chain_hash_mismatch", "c3", lambda: forged("c3", chain_hash=ZERO)),
        ("invalid_mask_order", "c3", lambda: as_exact(branching(), "c3", [1.0, 0.0])),
        (
            "empty_generation",
            "c3",
            lambda: forged("c3", carry_len=2, logprobs=np.empty(0, np.float32)),
        ),
        ("empty_generation", "c3", lambda: as_exact(branching(), "c3", [0.0, -0.0])),
        ("cumulative_hash_mismatch", "c4", lambda: forged("c4", cumulative_hash=ZERO)),
        # Of two faults of a path the one nearer its root is named, whatever their kinds are.
        ("empty_generation", "c3", lambda: forged_each(c3=UNSAMPLED, c4={"chain_hash": ZERO})),
        ("chain_hash_mismatch", "c1", lambda: forged_each(c1={"chain_hash": ZERO}, c3=UNSAMPLED)),
    ],
)
def test_every_breakage_has_its_code_and_names_its_call(
    code: str, call_id: str | None, breakage: Breakage
) -> None:
    receipt, calls = breakage()
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(receipt, calls)
    assert (refused.value.code, refused.value.call_id) == (code, call_id)


def test_a_call_that_does_not_fit_a_path_is_told_from_a_corrupt_one() -> None:
    with pytest.raises(PathError):
        verify_and_linearize(*forged("c3", chain_hash=ZERO))
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(*with_record(2, digest=ZERO))
    assert not isinstance(refused.value, PathError)


@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize(
    "changes",
    [
        {"chain_hash": ZERO},
        {"cumulative_hash": ZERO},
        {"carry_len": 3, "logprobs": np.empty(0, np.float32)},
    ],
)
def test_a_dead_branch_is_authentic_but_need_not_form_a_path(changes: dict[str, Any]) -> None:
    assert verify_and_linearize(*forged("c2", **changes)).call_ids == ("c1", "c3", "c4")


@pytest.mark.requirement("FOR-4")
def test_interior_cumulative_hashes_are_not_anchors_of_the_terminal() -> None:
    assert verify_and_linearize(*forged("c3", cumulative_hash=ZERO)).call_ids[-1] == "c4"


@pytest.mark.requirement("FOR-4")
def test_a_forest_has_a_row_an_endpoint_in_the_order_asked() -> None:
    attempt = branching()
    rows = verify_paths(attempt.receipt("c4"), attempt.staged(), ["c4", "c2", "r"])
    assert [row.call_ids for row in rows] == [("c1", "c3", "c4"), ("c1", "c2"), ("r",)]
    for row in rows:
        assert row.token_ids.tolist() == attempt.paths[row.call_ids[-1]].tolist()


@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize(
    ("code", "call_id", "changes", "endpoints"),
    [
        ("chain_hash_mismatch", "c2", {"chain_hash": ZERO}, ["c4"]),
        ("cumulative_hash_mismatch", "c2", {"cumulative_hash": ZERO}, ["c4", "c2"]),
    ],
)
def test_a_forest_checks_every_chain_hash_and_every_endpoint(
    code: str, call_id: str, changes: dict[str, Any], endpoints: list[str]
) -> None:
    with pytest.raises(VerificationError) as refused:
        verify_paths(*forged("c2", **changes), endpoints)
    assert (refused.value.code, refused.value.call_id) == (code, call_id)


@pytest.mark.bugcase("B20")
@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize("position", range(5))
def test_one_flipped_id_is_refused_with_its_call(position: int) -> None:
    attempt = branching()
    calls = attempt.staged()
    flipped = calls[position].token_ids.copy()
    flipped[-1] ^= 1
    calls[position] = replace(calls[position], token_ids=flipped)
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(attempt.receipt("c4"), calls)
    call_id = calls[position].identity.call_id
    assert (refused.value.code, refused.value.call_id) == ("corrupt_digest", call_id)
    assert call_id in str(refused.value)


@pytest.mark.bugcase("B20")
@pytest.mark.requirement("FOR-4")
def test_swapped_payloads_of_equal_length_are_refused_with_the_call() -> None:
    attempt = Attempt(
        Turn("c1", None, [1, 2], [3]), Turn("c2", "c1", [4], [5]), Turn("c3", "c1", [6], [7])
    )
    first, second, third = attempt.staged()
    swapped = [
        first,
        replace(second, token_ids=third.token_ids, logprobs=third.logprobs),
        replace(third, token_ids=second.token_ids, logprobs=second.logprobs),
    ]
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(attempt.receipt("c3"), swapped)
    assert (refused.value.code, refused.value.call_id) == ("corrupt_digest", "c2")


@pytest.mark.bugcase("B20")
def test_a_lost_token_is_refused_with_the_call() -> None:
    attempt = branching()
    calls = attempt.staged()
    calls[2] = replace(calls[2], token_ids=calls[2].token_ids[:-1])
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(attempt.receipt("c4"), calls)
    assert (refused.value.code, refused.value.call_id) == ("wrong_delta_len", "c3")


def test_lineage_is_checked_in_time_linear_in_calls() -> None:
    """Children before parents is the order that a walk to the root from each call pays most for."""
    count = 4000
    turns = [Turn("c0", None, [1], [2])]
    turns += [Turn(f"c{n}", f"c{n - 1}", [], [3]) for n in range(1, 60)]
    attempt = Attempt(*turns)
    calls = attempt.staged()[::-1]
    assert len(verify_and_linearize(receipt_of(calls, "c59"), calls).links) == 60

    walked: list[str] = []

    class Counting(dict[str, CallRecord]):
        def __getitem__(self, key: str) -> CallRecord:
            walked.append(key)
            return super().__getitem__(key)

    row = receipt_of(calls[:1], None).manifest[0]
    records = Counting(
        (
            f"n{n}",
            replace(
                row,
                call_id=f"n{n}",
                parent_call_id=f"n{n - 1}" if n else None,
                prev_len=n,
                cum_len=n + 1,
            ),
        )
        for n in reversed(range(count))
    )
    _check_lineage(records)
    assert len(walked) <= 2 * count


def test_ids_of_the_contract_s_range_are_joined() -> None:
    attempt = branching()
    receipt, calls = as_exact(attempt, "c3", [0.0, 1.0])
    row = verify_and_linearize(receipt, calls)
    assert row.token_ids.dtype == np.uint64
    assert row.token_ids.tolist() == attempt.paths["c4"].tolist()
