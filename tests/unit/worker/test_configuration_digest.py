"""What binds an attempt to its engine: everything that decides how messages become tokens."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from callforest_mesh.worker.vllm.configuration_digest import (
    digest_configuration,
    require_options_without_prompt,
)

ARGUMENTS: dict[str, object] = {
    "tokenizer": None,
    "tool_call_parser": "hermes",
    "reasoning_parser": "",
    "chat_template_content_format": "auto",
    "default_chat_template_kwargs": None,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def digest(model: Path, template: str | None = None, **changed: object) -> bytes:
    return digest_configuration(model, template, {**ARGUMENTS, **changed})


@pytest.mark.requirement("CAP-11")
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "processing_model.py",
    ],
)
def test_every_file_that_makes_tokens_counts(model: Path, name: str) -> None:
    path = model / name
    path.parent.mkdir(exist_ok=True)
    digests = {digest(model)}
    for content in ("one", "two"):
        path.write_text(content)
        digests.add(digest(model))
    assert len(digests) == 3
    assert all(len(one) == 32 for one in digests)


@pytest.mark.requirement("CAP-11")
@pytest.mark.parametrize(
    "changed",
    [
        {"template": "{{ messages }}"},
        {"default_chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_parser": "qwen3"},
        {"structured_outputs_config": SimpleNamespace(reasoning_parser="qwen3")},
        {"tool_call_parser": "llama3_json"},
        {"chat_template_content_format": "openai"},
        {"exclude_tools_when_tool_choice_none": True},
        {"mm_processor_kwargs": {"max_pixels": 4}},
        {"hf_overrides": {"rope_theta": 1}},
        {"generation_config": "auto"},
    ],
)
def test_every_default_of_the_server_counts(model: Path, changed: dict[str, object]) -> None:
    assert digest(model, **changed) != digest(model)
    assert digest(model, **changed) == digest(model, **changed)


@pytest.mark.requirement("CAP-11")
def test_a_template_counts_by_what_it_says(model: Path) -> None:
    assert digest(model, "a") != digest(model, "b")
    assert digest(model, "a") == digest(model, "a", chat_template="from here")
    assert digest(model, "a", chat_template="from here") == digest(model, "a", chat_template="from")


@pytest.mark.requirement("CAP-11")
def test_a_tokenizer_of_its_own_and_code_of_parsers_count(model: Path, tmp_path: Path) -> None:
    tokenizer, plugin = tmp_path / "tokenizer", tmp_path / "parser.py"
    tokenizer.mkdir()
    digests = set()
    for content in ("one", "two"):
        (tokenizer / "tokenizer.json").write_text(content)
        digests.add(digest(model, tokenizer=str(tokenizer)))
        plugin.write_text(content)
        digests.add(digest(model, tool_parser_plugin=str(plugin)))
    assert len(digests) == 4
    assert digest(model, tokenizer=str(model)) == digest(model)


def test_weights_and_what_is_hidden_do_not_count(model: Path) -> None:
    before = digest(model)
    (model / "model.safetensors").write_text("weights")
    (model / "model.safetensors.index.json").write_text("{}")
    (model / ".cache").mkdir()
    (model / ".cache" / "download.json").write_text("today")
    assert digest(model) == before


def test_a_directory_without_a_model_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        digest(model)


@pytest.mark.requirement("CAP-11")
def test_prompts_that_depend_on_how_an_answer_shall_look_are_refused() -> None:
    """No history is compared by `tool_choice`: the tools of a call before would be spliced in."""
    require_options_without_prompt(ARGUMENTS, "hf")
    excluding = {**ARGUMENTS, "exclude_tools_when_tool_choice_none": True}
    with pytest.raises(ValueError, match="leave `tools` out"):
        require_options_without_prompt(excluding, "hf")
    with pytest.raises(ValueError, match="kimi_k3"):
        require_options_without_prompt(ARGUMENTS, "kimi_k3")
