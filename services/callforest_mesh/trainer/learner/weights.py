"""Names and layouts of weights: Hugging Face on one side, Megatron-core on the other.

Both directions only cut, reshape and join, so a round trip gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from callforest_mesh.chassis.directory import sync_directory, sync_file
from callforest_mesh.trainer.learner.architecture import (
    Architecture,
    ModelRefusal,
    ModelRefusedError,
)

Weights: TypeAlias = dict[str, Tensor]

_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_INNER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_INNER_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_OUTPUT = ("output_layer.weight", "lm_head.weight")
_QKV = "self_attention.linear_qkv.weight"
_Q, _K, _V = (f"self_attn.{part}_proj.weight" for part in "qkv")
_FC1 = "mlp.linear_fc1.weight"
_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"


def _same_layout(architecture: Architecture) -> dict[str, str]:
    """Megatron name to Hugging Face name, for every weight that both lay out alike."""
    names = dict(_OUTER)
    if not architecture.tied_embeddings:
        names[_OUTPUT[0]] = _OUTPUT[1]
    inner = _INNER | (_INNER_NORMS if architecture.normalises_queries else {})
    for layer in range(architecture.layer_count):
        for ours, theirs in inner.items():
            names[f"decoder.layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names


def to_megatron(weights: Mapping[str, Tensor], architecture: Architecture) -> Weights:
    """Turn Hugging Face weights into Megatron's.

    Megatron keeps queries, keys and values together by query group, [q.. k v], and gate above up.

    Raises:
        ModelRefusedError: a weight is missing, unknown, or has the wrong shape.
    """
    left = dict(weights)
    if architecture.tied_embeddings:
        left.pop(_OUTPUT[1], None)
    groups, size = architecture.group_count, architecture.head_size
    try:
        result = {ours: left.pop(theirs) for ours, theirs in _same_layout(architecture).items()}
        for layer in range(architecture.layer_count):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            parts = [
                left.pop(theirs + name).view(groups, -1, architecture.hidden_size)
                for name in (_Q, _K, _V)
            ]
            if [part.shape[1] for part in parts[1:]] != [size, size]:
                raise ModelRefusedError(ModelRefusal.WEIGHTS_MISMATCH, f"keys of layer {layer}")
            result[ours + _QKV] = torch.cat(parts, 1).reshape(-1, architecture.hidden_size)
            result[ours + _FC1] = torch.cat([left.pop(theirs + name) for name in (_GATE, _UP)])
    except KeyError as error:
        raise ModelRefusedError(
            ModelRefusal.WEIGHTS_MISMATCH, f"{error.args[0]} is missing"
        ) from error
    except RuntimeError as error:
        raise ModelRefusedError(ModelRefusal.WEIGHTS_MISMATCH, str(error)) from error
    if left:
        raise ModelRefusedError(ModelRefusal.WEIGHTS_MISMATCH, f"{min(left)} has no place")
    return result


def to_hugging_face(weights: Mapping[str, Tensor], architecture: Architecture) -> Weights:
    """Turn Megatron weights into Hugging Face's; contiguous, detached copies."""
    result = {theirs: weights[ours] for ours, theirs in _same_layout(architecture).items()}
    groups, size = architecture.group_count, architecture.head_size
    queries = architecture.head_count // groups * size
    for layer in range(architecture.layer_count):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        grouped = weights[ours + _QKV].view(groups, queries + 2 * size, -1)
        parts = torch.split(grouped, [queries, size, size], 1)
        for name, part in zip((_Q, _K, _V), parts, strict=True):
            result[theirs + name] = part.reshape(-1, part.shape[-1])
        for name, part in zip((_GATE, _UP), weights[ours + _FC1].chunk(2), strict=True):
            result[theirs + name] = part
    return {
        name: part.detach().clone(memory_format=torch.contiguous_format)
        for name, part in result.items()
    }


def read_checkpoint(model_dir: Path) -> Weights:
    """Read every safetensors shard of a Hugging Face checkpoint.

    Raises:
        ModelRefusedError: there is none, one cannot be read, or a name comes twice.
    """
    weights: Weights = {}
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise ModelRefusedError(ModelRefusal.WEIGHTS_MISMATCH, "no safetensors file")
    for shard in shards:
        try:
            part = load_file(shard)
        except (OSError, SafetensorError) as error:
            raise ModelRefusedError(
                ModelRefusal.WEIGHTS_MISMATCH, f"{shard.name}: {error}"
            ) from error
        if weights.keys() & part.keys():
            raise ModelRefusedError(
                ModelRefusal.WEIGHTS_MISMATCH, f"{min(weights.keys() & part.keys())} comes twice"
            )
        weights.update(part)
    return weights


def write_durably(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that is either absent or whole, also after a power cut.

    Written under a temporary name beside it, synced, renamed, and the directory synced.
    """
    partial = path.with_name(f".{path.name}.partial")
    save_file(dict(weights), partial, metadata={"format": "pt"})
    sync_file(partial)
    partial.replace(path)
    sync_directory(path.parent)
