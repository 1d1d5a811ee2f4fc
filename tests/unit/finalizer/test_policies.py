"""Policies are found when the configuration is read, and what they raise stays in the log."""

from __future__ import annotations

import logging

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.forest.selection import SelectionRefusedError
from callforest_mesh.finalizer.policies import Policy, resolve_policy
from callforest_mesh.finalizer.service import FinalizerOptions
from tests.unit.finalizer.rollouts import records_of, two_turns

HERE = "tests.unit.finalizer.harness_policies"
RECORDS: tuple[CallRecord, ...] = records_of(two_turns())


@pytest.mark.requirement("SEL-4")
@pytest.mark.parametrize("name", ["returned_history", "all_captured"])
def test_built_in_policies_have_no_function(name: str) -> None:
    assert resolve_policy(name) == Policy(name)


@pytest.mark.requirement("SEL-4")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("newest", "package.module:function"),
        ("", "package.module:function"),
        ("os.path", "package.module:function"),
        ("a..b:c", "package.module:function"),
        ("no_such_package.training:choose", "cannot be imported"),
        (f"{HERE}:nobody", "has no function nobody"),
        (f"{HERE}:NOT_A_FUNCTION", "has no function"),
        (f"{HERE}:waits", "plain function"),
        (f"{HERE}:takes_one", "must take"),
    ],
)
def test_a_policy_that_cannot_be_found_is_refused_before_any_rollout(
    name: str, why: str, tmp_path
) -> None:
    with pytest.raises(ValueError, match=why):
        resolve_policy(name)
    with pytest.raises(ValueError, match=why):
        FinalizerOptions(tmp_path, selection_policy=name)


@pytest.mark.requirement("SEL-4")
def test_a_policy_gets_copies_and_its_order_is_kept() -> None:
    policy = resolve_policy(f"{HERE}:last_root")
    chosen = policy.select(RECORDS, {"keep": ["c2", "c1"]})
    assert chosen == (("c2", "c1"), "c1")
    assert len(RECORDS) == 2


@pytest.mark.requirement("SEL-4")
def test_a_record_that_a_policy_changed_is_not_taken() -> None:
    with pytest.raises(SelectionRefusedError) as caught:
        resolve_policy(f"{HERE}:alters").select(RECORDS, {})
    assert (caught.value.fault, caught.value.call_ids) == ("policy_changed_record", ("c1",))
    assert RECORDS[0].parent_call_id is None


@pytest.mark.requirement("SEL-4")
@pytest.mark.parametrize("name", ["raises", "gives_up", "gives_one", "hides_a_coroutine"])
def test_a_policy_that_fails_is_an_incident_of_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = resolve_policy(f"{HERE}:{name}")
    with (
        caplog.at_level(logging.ERROR, "callforest"),
        pytest.raises(SelectionRefusedError) as caught,
    ):
        policy.select(RECORDS, {})
    assert caught.value.fault == "policy_failed"
    (record,) = caplog.records
    incident_id = record.getMessage().split()[1]
    assert incident_id in caught.value.detail
    assert "secret" not in str(caught.value)
    assert record.exc_info is not None
