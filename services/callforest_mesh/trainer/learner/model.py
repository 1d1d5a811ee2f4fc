"""A Megatron-core GPTModel that runs on a CPU without patching torch or Megatron.

Two parts of Megatron move tensors to a GPU by name: the rotary table and the stock core attention.
On a CPU both are replaced where Megatron allows it: through the layer spec, and by assignment to
our own model. On a GPU the stock parts stay.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from callforest_mesh.trainer.batch import MicrobatchColumns
from callforest_mesh.trainer.learner.architecture import (
    Architecture,
    ModelRefusal,
    ModelRefusedError,
    read_architecture,
)
from callforest_mesh.trainer.learner.weights import read_checkpoint, to_megatron

with warnings.catch_warnings():
    # Megatron warns at import that Apex and Transformer Engine, which need a GPU, are absent.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class Attention(enum.Enum):
    """Which core attention the model gets."""

    SDPA = "sdpa"
    """PyTorch's scaled dot-product attention: CPU and GPU, padded and packed."""
    STOCK = "stock"
    """Megatron's own: GPU only, padded only."""


class _Offsets(Protocol):
    cu_seqlens_q: Tensor


class SdpaCoreAttention(nn.Module):
    """Causal attention in place of Megatron's DotProductAttention; same constructor and shapes.

    Padded: query [s, b, heads, d], key and value [s, b, groups, d], result [s, b, heads * d].
    Packed: the same without b, each row attending to itself alone, result [t, 1, heads * d].
    """

    def __init__(
        self,
        config: object,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        del config, layer_number, attn_mask_type, attention_type, unused
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: _Offsets | None = None,
    ) -> Tensor:
        """Attend. Every mask but the causal one is refused.

        Raises:
            ValueError: a mask or a bias was given.
        """
        del attn_mask_type
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("only causal attention without a bias is implemented")
        if packed_seq_params is None:
            mixed = self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)))
            return mixed.permute(2, 0, 1, 3).flatten(2)
        offsets: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        rows = [
            self._attend(*(part[start:end].transpose(0, 1)[None] for part in (query, key, value)))
            for start, end in itertools.pairwise(offsets)
        ]
        return torch.cat([row[0].transpose(0, 1) for row in rows]).flatten(1).unsqueeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class CpuRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc] # Megatron ships no types
    """Megatron's rotary table, left on the CPU instead of moved to a GPU."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of each position, shape [max_seq_len, 1, 1, head size]."""
        frequencies: Tensor = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((frequencies, frequencies), dim=-1)[:, None, None, :]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to build the model.

    Attributes:
        device: "cpu" or "cuda".
        attention: None picks SDPA on a CPU and the stock one on a GPU.
        seed: of every random generator.
    """

    device: str = "cpu"
    attention: Attention | None = None
    seed: int = 1234

    @property
    def core_attention(self) -> Attention:
        """The attention in use."""
        if self.attention is not None:
            return self.attention
        return Attention.SDPA if self.device == "cpu" else Attention.STOCK


class PolicyModel:
    """The policy: a checkpoint as a GPTModel in float32.

    Attributes:
        architecture: what the checkpoint is.
        module: Megatron's model.
        dtypes: the type of each Hugging Face weight in the checkpoint, for the export.
    """

    def __init__(self, model_dir: Path, options: ModelOptions) -> None:
        """Build the model and load the checkpoint.

        Raises:
            ModelRefusedError: the checkpoint cannot be trained exactly.
        """
        self.architecture = read_architecture(model_dir)
        self._options = options
        weights = read_checkpoint(model_dir)
        self.dtypes = {name: weight.dtype for name, weight in weights.items()}
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        torch.manual_seed(options.seed)
        if options.device == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        self.module = _build(self.architecture, options)
        self.load(to_megatron(weights, self.architecture))

    def load(self, weights: dict[str, Tensor]) -> None:
        """Replace every weight by Megatron-named ones.

        Raises:
            ModelRefusedError: a name or a shape does not fit.
        """
        with torch.no_grad():
            own = dict(self.module.named_parameters())
            if own.keys() != weights.keys():
                odd = min(own.keys() ^ weights.keys())
                raise ModelRefusedError(ModelRefusal.WEIGHTS_MISMATCH, f"{odd} is on one side only")
            for name, weight in weights.items():
                if own[name].shape != weight.shape:
                    raise ModelRefusedError(
                        ModelRefusal.WEIGHTS_MISMATCH,
                        f"{name} is {tuple(weight.shape)}, not {tuple(own[name].shape)}",
                    )
            for name, weight in weights.items():
                own[name].copy_(weight)

    def weights(self) -> dict[str, Tensor]:
        """Every weight by Megatron's name, detached, not copied."""
        return {name: weight.detach() for name, weight in self.module.named_parameters()}

    def logits(self, columns: MicrobatchColumns) -> Tensor:
        """Run the model forward.

        Returns:
            Shape [b, s, vocabulary], float32: position t scores the token after t.

        Raises:
            ModelRefusedError: packed columns without the attention that can keep rows apart.
        """
        packing = None
        if columns.row_offsets is not None:
            if self._options.core_attention is not Attention.SDPA:
                raise ModelRefusedError(ModelRefusal.PACKING_NEEDS_SDPA)
            offsets = torch.from_numpy(columns.row_offsets).to(self._options.device)
            longest = int((columns.row_offsets[1:] - columns.row_offsets[:-1]).max())
            packing = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        with _megatron_defaults():
            logits: Tensor = self.module(
                torch.from_numpy(columns.input_ids).to(self._options.device),
                torch.from_numpy(columns.position_ids).to(self._options.device),
                attention_mask=None,
                packed_seq_params=packing,
            )
        return logits.float()


@contextlib.contextmanager
def _megatron_defaults() -> Iterator[None]:
    """Let Megatron's own layers take its default groups and sizes without a warning a layer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: tp_group is None", DeprecationWarning)
        warnings.filterwarnings("ignore", "MLP requires ffn_hidden_size", DeprecationWarning)
        yield


def _build(architecture: Architecture, options: ModelOptions) -> nn.Module:
    """Build the module with the reference arithmetic: no fusion, no dropout, float32."""
    on_cpu = options.device == "cpu"
    config = TransformerConfig(
        num_layers=architecture.layer_count,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.head_count,
        num_query_groups=architecture.group_count,
        kv_channels=architecture.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        qk_layernorm=architecture.normalises_queries,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )
    with _megatron_defaults():
        module: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(architecture, options),
            vocab_size=architecture.vocabulary_size,
            max_sequence_length=architecture.position_limit,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_base,
            rotary_percent=1.0,
        )
    if on_cpu:
        module.rotary_pos_emb = CpuRotaryEmbedding(
            kv_channels=architecture.head_size,
            rotary_percent=1.0,
            rotary_base=architecture.rope_base,
            use_cpu_initialization=True,
        )
    return module.to(options.device)


def _layer_spec(architecture: Architecture, options: ModelOptions) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        qk_layernorm=architecture.normalises_queries, normalization="RMSNorm"
    )
    if options.core_attention is Attention.SDPA:
        spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    return spec
