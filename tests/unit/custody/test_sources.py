"""Restored calls: each is verified under its owner, and owners must fit together (ADM-9)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.verification import VerificationError, verify_paths
from tests.unit.custody.chains import ids

pytestmark = pytest.mark.requirement("ADM-9")

FIRST, SECOND, THIRD = "r1", "r1-a1", "r1-a2"


class Restored:
    """A chain of calls whose owners are given, as the third attempt's receipt has it."""

    def __init__(self, owners: tuple[str, ...] = (FIRST, FIRST, SECOND, THIRD)) -> None:
        self.calls: list[StagedCall] = []
        self.records: list[CallRecord] = []
        prefix: np.ndarray | None = None
        for number, owner in enumerate(owners):
            before = self.calls[-1] if self.calls else None
            parent = before.identity if before else None
            foreign = parent is not None and parent.capture_key != owner
            identity = CallIdentity(
                owner,
                f"c{number}",
                parent.call_id if parent else None,
                parent.capture_key if parent and foreign else "",
            )
            prompt = np.concatenate((ids() if prefix is None else prefix, ids(number + 1)))
            call = complete_call(
                identity,
                prefix=prefix,
                parent_chain_hash=before.chain_hash if before else None,
                prompt_ids=prompt,
                generated_ids=ids(10 + number),
                logprobs=[-0.5],
                weight_version=7,
            )
            prefix = np.concatenate((prompt, ids(10 + number)))
            record = replace(
                CallRecord.of(call, ""),
                source_capture_key="" if owner == THIRD else owner,
                parent_capture_key=(
                    parent.capture_key if parent and parent.capture_key != THIRD else ""
                ),
            )
            self.calls.append(call)
            self.records.append(record)

    def verify(self) -> list[int]:
        receipt = Receipt(THIRD, tuple(self.records), None)
        (row,) = verify_paths(receipt, self.calls, [self.records[-1].call_id])
        assert row.capture_key == THIRD
        return list(row.token_ids.tolist())

    def change(self, position: int, **changes: Any) -> None:
        self.records[position] = replace(self.records[position], **changes)

    def move(self, position: int, **changes: Any) -> None:
        call = self.calls[position]
        self.calls[position] = replace(call, identity=replace(call.identity, **changes))


def code_of(attempt: Restored) -> tuple[str, str | None]:
    with pytest.raises(VerificationError) as caught:
        attempt.verify()
    return caught.value.code, caught.value.call_id


@pytest.mark.requirement("TRN-12")
@pytest.mark.parametrize(
    "owners",
    [
        (FIRST, THIRD),
        (FIRST, SECOND, THIRD),
        (FIRST, FIRST, SECOND, THIRD),
        (SECOND, SECOND),
        (THIRD, THIRD),
    ],
)
def test_calls_of_several_owners_verify_and_join(owners: tuple[str, ...]) -> None:
    expected = [token for n in range(len(owners)) for token in (n + 1, 10 + n)]
    assert Restored(owners).verify() == expected


def test_a_call_that_is_not_its_owners_is_refused() -> None:
    attempt = Restored()
    attempt.change(1, source_capture_key=SECOND)
    assert code_of(attempt) == ("wrong_rollout", "c1")


def test_a_restored_call_that_says_it_is_the_attempts_own_is_refused() -> None:
    attempt = Restored()
    attempt.change(0, source_capture_key="")
    assert code_of(attempt) == ("wrong_rollout", "c0")


def test_a_restored_call_that_was_digested_for_another_attempt_is_corrupt() -> None:
    attempt = Restored()
    attempt.move(2, capture_key=FIRST)
    attempt.change(2, source_capture_key=FIRST)
    assert code_of(attempt) == ("corrupt_digest", "c2")


@pytest.mark.parametrize("owner", ["r2", "r1-a3", "r1-a03"])
def test_an_owner_must_be_an_earlier_attempt_of_the_rollout(owner: str) -> None:
    attempt = Restored((owner, owner))
    assert code_of(attempt) == ("wrong_source", "c0")


def test_an_owner_is_not_later_than_that_of_what_continues_it() -> None:
    assert code_of(Restored((SECOND, FIRST, THIRD))) == ("wrong_source", "c1")


@pytest.mark.parametrize("said", ["", SECOND, "r2"])
def test_a_record_names_its_parents_owner(said: str) -> None:
    attempt = Restored()
    attempt.change(1, parent_capture_key=said)
    assert code_of(attempt) == ("wrong_source", "c1")


@pytest.mark.parametrize("said", ["", FIRST, "r2"])
def test_a_staged_call_names_its_parents_owner(said: str) -> None:
    attempt = Restored()
    attempt.move(3, parent_capture_key=said)
    assert code_of(attempt) == ("wrong_source", "c3")


def test_a_root_names_no_parents_owner() -> None:
    attempt = Restored()
    attempt.move(0, parent_capture_key=FIRST)
    assert code_of(attempt) == ("wrong_source", "c0")
