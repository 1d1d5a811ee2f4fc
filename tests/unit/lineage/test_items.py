"""Items of request and response bodies."""

import json

import pytest

from callforest_core.lineage.fingerprint import assistant_fingerprint
from callforest_core.lineage.items import Dialect, ItemsError, request_items, response_items

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"é": 1.0}}}]


def test_turns_are_taken_as_received() -> None:
    chat = {"model": "m", "messages": [TURNS[0], None, TURNS[1], 7], "temperature": 1.0}
    assert request_items(chat, Dialect.CHAT) == [*TURNS, 7]
    assert request_items({"input": TURNS}, Dialect.RESPONSES) == TURNS


def test_a_string_input_is_no_turn() -> None:
    assert request_items({"input": "hi"}, Dialect.RESPONSES) == []
    envelope, *turns = request_items({"input": "hi", "instructions": "be brief"}, Dialect.RESPONSES)
    assert envelope["role"] == "_ng_request_envelope"
    assert turns == []


def test_tools_and_instructions_come_first_as_an_envelope() -> None:
    envelope, *turns = request_items({"messages": TURNS, "tools": TOOLS}, Dialect.CHAT)
    assert turns == TURNS
    assert envelope == {
        "role": "_ng_request_envelope",
        "content": '{"instructions": null, "tools": [{"function": {"name": "run", '
        '"parameters": {"\\u00e9": 1.0}}, "type": "function"}]}',
    }
    assert assistant_fingerprint([envelope]) == b""


@pytest.mark.parametrize("absent", [{}, {"tools": []}, {"tools": None, "instructions": ""}])
def test_without_either_there_is_no_envelope(absent: dict[str, object]) -> None:
    assert request_items({"messages": TURNS, **absent}, Dialect.CHAT) == TURNS


def test_a_chat_answer_is_an_assistant_item_without_token_columns() -> None:
    served = {
        "id": "resp-1",
        "choices": [
            {"message": {"content": "hello", "generation_token_ids": [1], "routed_experts": "x"}},
            {"message": None},
        ],
    }
    item, empty = response_items(served, Dialect.CHAT)
    assert item == {"type": "message", "role": "assistant", "content": "hello"}
    assert empty == {"type": "message", "role": "assistant"}
    assert assistant_fingerprint([item]) == assistant_fingerprint(TURNS)


def test_a_responses_answer_is_its_output_objects() -> None:
    output = [{"type": "reasoning"}, "stray", {"role": "assistant", "content": "hello"}]
    items = response_items({"output": output}, Dialect.RESPONSES)
    assert items == [output[0], output[2]]
    assert response_items({"output": None}, Dialect.RESPONSES) == []


def test_two_carriers_of_token_columns_are_an_error() -> None:
    message = {"content": "x", "generation_token_ids": []}
    served = {"choices": [{"message": message}, {"message": json.loads(json.dumps(message))}]}
    with pytest.raises(ItemsError, match="more than one"):
        response_items(served, Dialect.CHAT)


@pytest.mark.parametrize("choices", [["text"], "text", [[1]]])
def test_choices_that_are_no_objects_are_an_error(choices: object) -> None:
    with pytest.raises(ItemsError, match="choice"):
        response_items({"choices": choices}, Dialect.CHAT)
    assert response_items({"choices": None}, Dialect.CHAT) == []
