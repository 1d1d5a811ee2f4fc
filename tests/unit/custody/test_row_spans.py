"""Where the calls of a verified path stand in its row."""

import pytest

from callforest_core.custody.verification import verify_and_linearize
from tests.unit.custody.chains import Attempt, Turn


@pytest.mark.bugcase("B13")
@pytest.mark.requirement("FOR-4")
def test_four_calls_of_three_tokens_give_one_row_with_four_spans() -> None:
    attempt = Attempt(
        Turn("c0", None, [1], [2, 3]),
        *(Turn(f"c{n}", f"c{n - 1}", [10 * n], [10 * n + 1, 10 * n + 2]) for n in (1, 2, 3)),
    )
    row = verify_and_linearize(attempt.receipt("c3"), attempt.staged())
    last = attempt.calls["c3"]
    prompt_len = last.prev_len + last.carry_len
    assert len(row.token_ids) == prompt_len + last.generation_len == 12
    assert [link.generation_len for link in row.links] == [2, 2, 2, 2]
    assert row.token_mask.tolist() == [0, 1, 1] * 4
