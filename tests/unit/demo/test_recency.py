"""The compacting harness: what it shows, how it resamples, when it stops asking."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from callforest_mesh.demo.compacting_harness import CompactingHarness, CompactingOptions
from callforest_mesh.demo.recency import HIDDEN, RecencyHistory, RecencyOptions
from callforest_mesh.demo.response_selection import (
    CallLimitError,
    ClientClosedError,
    ResponseSelector,
    RetriesSpentError,
    SelectionLimits,
)

OPENING: list[ChatCompletionMessageParam] = [{"role": "user", "content": "go"}]
Answer = Callable[[httpx.Request], httpx.Response]


def _shown(history: RecencyHistory) -> list[str]:
    return [str(message.get("content")) for message in history.context()]


@pytest.mark.requirement("CFG-2")
def test_contexts_extend_within_a_chunk_and_are_rewritten_when_it_closes() -> None:
    history = RecencyHistory(OPENING, RecencyOptions(keep_rounds=1, chunk_rounds=3))
    contexts = [_shown(history)]
    for number in range(1, 6):
        history.add(f"a{number}", f"o{number}", f"id{number}")
        contexts.append(_shown(history))
    for before, after in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert contexts[after][: len(contexts[before])] == contexts[before]
    assert contexts[3] == ["go", "a1", HIDDEN, "a2", HIDDEN, "a3", "o3"]
    assert contexts[5] == ["go", "a1", HIDDEN, "a2", HIDDEN, "a3", "o3", "a4", "o4", "a5", "o5"]
    assert history.boundaries == 1


@pytest.mark.requirement("CFG-2")
def test_keeping_one_round_hides_every_older_result() -> None:
    history = RecencyHistory(OPENING, RecencyOptions(keep_rounds=1, chunk_rounds=1))
    for number in range(1, 4):
        history.add(f"a{number}", f"o{number}", f"id{number}")
    assert _shown(history) == ["go", "a1", HIDDEN, "a2", HIDDEN, "a3", "o3"]
    assert history.boundaries == 2


def test_an_answer_carries_the_id_of_its_response() -> None:
    """Without it, equal answers of two samples would make the next request ambiguous (B15)."""
    history = RecencyHistory(OPENING, RecencyOptions())
    history.add("same", "o1", "chatcmpl-2")
    assert history.context()[1].get("id") == "chatcmpl-2"


def test_a_chunk_closes_early_only_if_that_hides_something() -> None:
    history = RecencyHistory(OPENING, RecencyOptions(keep_rounds=2, chunk_rounds=9))
    history.add("a1", "o1", "id1")
    assert not history.close_chunk()
    assert history.close_chunk(0)
    assert _shown(history) == ["go", "a1", HIDDEN]


@pytest.mark.parametrize("options", [{"keep_rounds": -1}, {"chunk_rounds": 0}])
def test_counts_that_make_no_chunk_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RecencyOptions(**options)


def _completion(text: str, number: int = 0) -> httpx.Response:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": "m"}
    return httpx.Response(200, json={**body, "choices": [choice]})


def _client(answer: Answer) -> openai.AsyncOpenAI:
    transport = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    base = "http://gateway.invalid/rollouts/r1/v1"
    return openai.AsyncOpenAI(api_key="k", base_url=base, http_client=transport, max_retries=0)


def _selector(answer: Answer, **limits: int) -> ResponseSelector:
    return ResponseSelector(_client(answer), "m", 8, SelectionLimits(**limits))


def _never(_: ChatCompletion) -> bool:
    return False


@pytest.mark.requirement("CAP-12")
async def test_a_resample_is_the_same_request_under_a_new_key() -> None:
    seen: list[tuple[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["Idempotency-Key"], json.loads(request.content)["messages"]))
        return _completion("no" if len(seen) == 1 else "7", len(seen))

    selector = _selector(answer, max_response_retries=3)
    chosen = await selector.select_response(
        OPENING, lambda one: one.choices[0].message.content == "7"
    )
    assert chosen.id == "chatcmpl-2"
    (first, messages), (second, again) = seen
    assert first != second
    assert messages == again == OPENING


@pytest.mark.requirement("CAP-12")
async def test_both_limits_bound_the_samples() -> None:
    count = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        return _completion("no", count)

    judged: list[str] = []

    def reject(completion: ChatCompletion) -> bool:
        judged.append(completion.id)
        return False

    selector = _selector(answer, max_response_retries=2, max_model_calls=4)
    with pytest.raises(RetriesSpentError):
        await selector.select_response(OPENING, reject)
    assert judged == ["chatcmpl-1", "chatcmpl-2", "chatcmpl-3"], "the last one is judged too"
    with pytest.raises(CallLimitError):
        await selector.select_response(OPENING, reject)
    assert judged[3:] == ["chatcmpl-4"]
    assert count == selector.calls == 4


@pytest.mark.requirement("CAP-12")
async def test_the_last_sample_that_the_limits_allow_can_be_accepted() -> None:
    answers = [_completion("no", 1), _completion("7", 2)]
    selector = _selector(lambda _: answers.pop(0), max_response_retries=1, max_model_calls=2)
    chosen = await selector.select_response(
        OPENING, lambda one: one.choices[0].message.content == "7"
    )
    assert chosen.id == "chatcmpl-2"
    with pytest.raises(CallLimitError):
        await selector.select_response(OPENING, _never)


@pytest.mark.requirement("CAP-12")
@pytest.mark.parametrize("rejected_at", [1, 3])
async def test_a_turn_whose_samples_were_all_rejected_ends_the_rollout(rejected_at: int) -> None:
    """What was rejected is in neither the history that is shown nor the one that is returned."""
    shown: list[str] = []
    turns = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal turns
        if request.url.path == "/context/r1/measure":
            turns += 1
            return httpx.Response(200, json={"prompt_token_count": 1, "is_exact": True})
        shown.append(request.content.decode())
        text = " \n" if turns >= rejected_at else "no digit"
        return _completion(text, len(shown))

    limits = SelectionLimits(max_response_retries=2)
    played = await CompactingHarness(CompactingOptions(limits=limits)).play(
        _client(answer), "m", "go"
    )
    accepted = rejected_at - 1
    assert len(shown) == accepted + 3
    assert played.answers == ("no digit",) * accepted
    assert len(json.loads(played.result)["responses"]) == accepted
    assert played.response_id == (f"chatcmpl-{accepted}" if accepted else "")
    assert " \n" not in [one["content"] for body in shown for one in json.loads(body)["messages"]]


@pytest.mark.requirement("CAP-12")
async def test_a_request_that_did_not_arrive_is_sent_again_as_it_was() -> None:
    """The gateway's 408: it read no whole body, so that no call can have begun."""
    seen: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["Idempotency-Key"], request.content))
        if len(seen) < 3:
            return httpx.Response(408, json={"error": {"message": "late"}})
        return _completion("7", len(seen))

    selector = _selector(answer, max_response_retries=2, max_model_calls=1)
    assert (await selector.select_response(OPENING, lambda _: True)).id == "chatcmpl-3"
    assert len(set(seen)) == 1
    assert selector.calls == 1, "what did not arrive was no call"
    seen.clear()
    selector = _selector(answer, max_response_retries=1)
    with pytest.raises(openai.APIStatusError, match="late"):
        await selector.select_response(OPENING, lambda _: True)
    assert len(seen) == 2
    assert (await selector.select_response(OPENING, lambda _: True)).id == "chatcmpl-3"


@pytest.mark.requirement("CAP-12")
@pytest.mark.parametrize("kind", ["reset", "timeout", "503"])
async def test_a_request_without_a_definite_answer_closes_the_client(kind: str) -> None:
    count = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        if kind == "reset":
            raise httpx.ReadError("connection reset", request=request)
        if kind == "timeout":
            raise httpx.ReadTimeout("late", request=request)
        return httpx.Response(503, json={"error": {"message": "away"}})

    selector = _selector(answer)
    with pytest.raises(openai.OpenAIError):
        await selector.select_response(OPENING, _never)
    with pytest.raises(ClientClosedError):
        await selector.select_response(OPENING, _never)
    assert count == 1


@pytest.mark.requirement("CAP-12")
async def test_a_definite_refusal_does_not_close_the_client() -> None:
    answers = [httpx.Response(422, json={"error": {"message": "ambiguous"}}), _completion("7")]
    selector = _selector(lambda _: answers.pop(0))
    with pytest.raises(openai.UnprocessableEntityError):
        await selector.select_response(OPENING, _never)
    assert (await selector.select_response(OPENING, lambda _: True)).id == "chatcmpl-0"


class _Gateway:
    """Answers as a gateway would: prompts count as the characters of their messages."""

    def __init__(self) -> None:
        self.measured: list[int] = []
        self.contexts: list[list[str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        texts = [one["content"] for one in json.loads(request.content)["messages"]]
        if request.url.path == "/context/r1/measure":
            self.measured.append(sum(map(len, texts)))
            measured = {"prompt_token_count": self.measured[-1], "is_exact": True}
            return httpx.Response(200, json=measured)
        self.contexts.append(texts)
        return _completion(f"answer {len(self.contexts)}", len(self.contexts))


@pytest.mark.requirement("CFG-2")
async def test_the_guard_closes_a_chunk_early() -> None:
    gateway = _Gateway()
    options = CompactingOptions(
        turns=4, context_tokens=190, recency=RecencyOptions(keep_rounds=1, chunk_rounds=99)
    )
    played = await CompactingHarness(options).play(_client(gateway), "m", "go")
    assert len(played.answers) == 4
    assert played.context_boundaries >= 1
    assert all(sum(map(len, shown)) <= 190 - 12 for shown in gateway.contexts)
    assert any(count > 190 - 12 for count in gateway.measured)


@pytest.mark.requirement("CFG-2")
async def test_a_guard_that_lets_nothing_through_ends_the_rollout_with_what_it_has() -> None:
    gateway = _Gateway()
    played = await CompactingHarness(CompactingOptions(context_tokens=60)).play(
        _client(gateway), "m", "go"
    )
    assert 0 < len(played.answers) < 4
    assert len(json.loads(played.result)["responses"]) == len(played.answers)


@pytest.mark.requirement("CFG-2")
async def test_what_is_returned_is_all_that_was_accepted_in_order() -> None:
    played = await CompactingHarness().play(_client(_Gateway()), "m", "go")
    returned = json.loads(played.result)["responses"]
    assert [one["output"][0]["content"] for one in returned] == list(played.answers)
    assert played.context_boundaries == 2
