"""What ends a turn and marks reasoning, read from the engine's configuration."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from callforest_mesh.worker.vllm.capture import Capture, current_capture
from callforest_mesh.worker.vllm.serving_layer import QuietRenderer
from callforest_mesh.worker.vllm.turn_marks import read_reasoning, read_terminators


def engine_with(configured: object, own: int | None) -> Any:
    config = {} if configured is None else {"eos_token_id": configured}
    return SimpleNamespace(
        model_config=SimpleNamespace(try_get_generation_config=lambda: config),
        get_tokenizer=lambda: SimpleNamespace(eos_token_id=own),
    )


@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    ("configured", "own", "terminators"),
    [
        (None, None, set()),
        (None, 7, {7}),
        (5, None, {5}),
        (5, 7, {5, 7}),
        ([1, 106], 1, {1, 106}),
        ([1, 106], 9, {1, 9, 106}),
        (0, None, {0}),
    ],
)
def test_terminators_are_the_generation_configuration_s_and_the_tokenizer_s(
    configured: object, own: int | None, terminators: set[int]
) -> None:
    assert read_terminators(engine_with(configured, own)) == terminators


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("parser", "marks", "expected"),
    [
        ("", ("[", "]"), ("<think>", "</think>")),
        ("brackets", ("[", "]"), ("[", "]")),
        ("marks nothing", (None, None), ("<think>", "</think>")),
    ],
)
def test_reasoning_is_marked_as_the_parser_has_it(
    monkeypatch: pytest.MonkeyPatch,
    parser: str,
    marks: tuple[str | None, str | None],
    expected: tuple[str, str],
) -> None:
    made = SimpleNamespace(reasoning_start_str=marks[0], reasoning_end_str=marks[1])
    manager = SimpleNamespace(get_reasoning_parser={parser: lambda _tokenizer: made}.get)
    upstream = SimpleNamespace(ReasoningParserManager=manager)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(reasoning=upstream))
    monkeypatch.setitem(sys.modules, "vllm.reasoning", upstream)
    reader = read_reasoning(Tokenizer(), parser)
    assert (reader.opens, reader.closes) == expected
    assert reader.decode(np.array([97, 98], np.uint32)) == "ab"


class Renderer:
    name = "inner"

    async def render_chat(self, request: object, **options: object) -> tuple[object, object]:
        return request, options


@pytest.mark.requirement("CAP-10")
async def test_a_measured_call_puts_no_media_into_the_renderer_s_cache() -> None:
    quiet = QuietRenderer(Renderer())
    assert quiet.name == "inner"
    assert await quiet.render_chat("r") == ("r", {})
    for measured, options in [(False, {}), (True, {"skip_mm_cache": True})]:
        token = current_capture.set(Capture(is_measured=measured))
        try:
            assert await quiet.render_chat("r") == ("r", options)
        finally:
            current_capture.reset(token)
