"""The tiny checkpoint: reproducible, with a tokenizer and a template that have real work."""

import json
from pathlib import Path
from typing import Any

import pytest

from callforest_mesh.worker.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.engine


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "seed-3", seed=3)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def test_one_seed_makes_the_same_bytes_and_another_other_weights(
    model: Path, tmp_path: Path
) -> None:
    first = contents_of(model)
    assert contents_of(make_tiny_model(tmp_path / "again", seed=3)) == first
    other = contents_of(make_tiny_model(tmp_path / "other", seed=4))
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}
    assert other.keys() == first.keys()


def test_every_id_decodes_and_every_text_encodes(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE
    assert all(tokenizer.convert_ids_to_tokens(token) for token in range(VOCABULARY_SIZE))
    text = "".join(map(chr, range(256))) + "☃ 漢字 <tool_call> 2026"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("0123456789")) == 10
    assert json.dumps([tokenizer.decode([token]) for token in range(VOCABULARY_SIZE)])


def test_template_renders_roles_tools_and_calls(tokenizer: Any) -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        tokenize=False,
    )
    listed, calls = text.split("<|im_start|>user\ngo<|im_end|>\n")
    assert listed.startswith("<|im_start|>system\nbe brief\n\n")
    assert json.dumps({"type": "function", "function": function}) in listed
    rendered_call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert calls == (
        f"<|im_start|>assistant\n{rendered_call}\n{rendered_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_width_must_suit_the_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        make_tiny_model(tmp_path, seed=0, hidden_size=40)
