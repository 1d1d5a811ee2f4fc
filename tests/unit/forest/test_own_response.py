"""What the result's own response says of the scored call, and accounts beside references."""

from __future__ import annotations

import pytest

from callforest_core.forest.returned import Returned
from callforest_core.forest.selection import SelectionRefusedError
from tests.unit.forest.captured import asked
from tests.unit.forest.test_returned_history import (
    A_SAYS,
    B_SAYS,
    C_SAYS,
    REFERENCES,
    TRANSCRIPT,
    select,
)


@pytest.mark.requirement("SEL-2")
def test_the_result_s_own_response_names_the_scored_call() -> None:
    answers = [{"output": one} for one in (A_SAYS, B_SAYS, C_SAYS)]
    whole = {"responses": answers, "response": {"output": TRANSCRIPT}}
    assert select(whole) == Returned(("a", "b", "c"), "c")
    earlier = {"responses": answers, "response": {"output": B_SAYS}}
    assert select(earlier) == Returned(("a", "b", "c"), "b"), "wherever it stands"


@pytest.mark.requirement("SEL-2")
def test_a_snapshot_may_repeat_what_was_referenced_and_nothing_else() -> None:
    early = [A_SAYS, [asked(), *C_SAYS], [asked(), *TRANSCRIPT]]
    with pytest.raises(SelectionRefusedError) as caught:
        select({"ng_trajectory": REFERENCES, "transitions": early})
    assert caught.value.fault == "history_contradicts_references"
    assert "at answer 2" in str(caught.value)


@pytest.mark.requirement("SEL-2")
def test_synthetic_ids_are_no_witnesses() -> None:
    synthetic = [{**one, "id": "msg_0f3e"} for one in C_SAYS]
    result = {"responses": [{"id": "resp_77", "output": synthetic}]}
    assert select(result).call_ids == ("c",)


@pytest.mark.requirement("SEL-2")
def test_a_snapshot_that_shows_nothing_new_and_names_nothing_adds_nothing() -> None:
    assert select({"transitions": [TRANSCRIPT, TRANSCRIPT]}).call_ids == ("a", "b", "c")
