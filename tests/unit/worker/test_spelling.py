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
@pytest.mark.parametrize("calls", [{"tool_calls": CALLS}, {"tool_calls": []}, {}], ids=str)
def test_an_answer_without_text_is_spelt_in_three_ways(
    calls: dict[str, object], content: dict[str, object]
) -> None:
    answer = {"role": "assistant", "x": 1, **calls}
    absent, null, empty = spellings_of([{**answer, **content}])
    assert absent == [answer]
    assert null == [{**answer, "content": None}]
    assert empty == [{**answer, "content": ""}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "tool_calls": CALLS, "content": None},
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
