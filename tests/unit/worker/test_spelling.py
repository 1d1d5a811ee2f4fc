"""The spellings that a renderer is asked about."""

import pytest

from callforest_mesh.worker.spelling import spellings_of

CALLS = [{"id": "c0"}]


@pytest.mark.bugcase("B06")
@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    "content",
    [
        {},
        {"content": None},
        {"content": ""},
        {"content": []},
        {"content": [{"type": "text", "text": ""}]},
        {"content": [{"type": "text", "text": None}, ""]},
    ],
    ids=str,
)
def test_an_answer_that_only_calls_is_spelt_in_three_ways(content: dict[str, object]) -> None:
    answer = {"role": "assistant", "tool_calls": CALLS, "x": 1}
    absent, null, empty = spellings_of([{**answer, **content}])
    assert absent == [answer]
    assert null == [{**answer, "content": None}]
    assert empty == [{**answer, "content": ""}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "tool_calls": CALLS, "content": None},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "text", "tool_calls": CALLS},
        {"role": "assistant", "content": " ", "tool_calls": CALLS},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": CALLS,
        },
        {"role": "assistant", "content": [{"type": "image_url"}], "tool_calls": CALLS},
        {"role": "assistant", "content": 5, "tool_calls": CALLS},
    ],
    ids=str,
)
def test_everything_else_stays(message: dict[str, object]) -> None:
    assert spellings_of([message]) == [[message]] * 3
