"""What a checkpoint says it is, and whether this learner can train it exactly (TRN-2)."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

CONFIG_FILE = "config.json"
DEFAULT_ROPE_BASE = 10000.0


class ModelRefusal(enum.Enum):
    """Why a checkpoint cannot be trained here."""

    NO_CONFIG = "no readable config.json"
    UNSUPPORTED_ARCHITECTURE = "only dense Qwen3 and Llama checkpoints are mapped"
    UNSUPPORTED_OPTION = "an option of the model has no exact counterpart"
    MOE_CAPACITY_LIMIT = "experts with a capacity limit drop tokens"
    MOE_AUXILIARY_LOSS = "an auxiliary router loss would be trained beside the policy loss"
    MOE_ROUTING = "experts must be chosen per token"
    WEIGHTS_MISMATCH = "the weights do not match the configuration"
    PACKING_NEEDS_SDPA = "packed bins need the SDPA core attention"


class ModelRefusedError(Exception):
    """The checkpoint cannot be trained exactly; nothing was loaded.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: ModelRefusal, fact: str = "") -> None:
        super().__init__(f"{refusal.value}: {fact}" if fact else refusal.value)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts routes, as far as exactness depends on it.

    Attributes:
        capacity_factor: tokens an expert takes relative to an even share; None is dropless.
        auxiliary_loss_coefficient: weight of the load-balancing loss.
        per_token: each token chooses its experts, rather than each expert its tokens.
    """

    capacity_factor: float | None
    auxiliary_loss_coefficient: float
    per_token: bool


def check_routing(routing: Routing | None) -> None:
    """Pass dense models (None) and dropless per-token routing without auxiliary loss (TRN-2).

    Raises:
        ModelRefusedError: the routing would make the loss depend on the microbatch.
    """
    if routing is None:
        return
    if routing.capacity_factor is not None:
        raise ModelRefusedError(
            ModelRefusal.MOE_CAPACITY_LIMIT, f"capacity factor {routing.capacity_factor}"
        )
    if routing.auxiliary_loss_coefficient != 0:
        raise ModelRefusedError(
            ModelRefusal.MOE_AUXILIARY_LOSS, f"coefficient {routing.auxiliary_loss_coefficient}"
        )
    if not routing.per_token:
        raise ModelRefusedError(ModelRefusal.MOE_ROUTING)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder in the terms of its Hugging Face configuration.

    Attributes:
        model_type: "qwen3" (normalised queries and keys) or "llama".
        digest: SHA-256 over the canonical configuration, hexadecimal.
    """

    model_type: str
    layer_count: int
    hidden_size: int
    intermediate_size: int
    head_count: int
    group_count: int
    head_size: int
    vocabulary_size: int
    position_limit: int
    norm_epsilon: float
    rope_base: float
    tied_embeddings: bool
    digest: str

    @property
    def normalises_queries(self) -> bool:
        """Whether queries and keys pass an RMS norm per head."""
        return self.model_type == "qwen3"


def read_architecture(model_dir: Path) -> Architecture:
    """Read and check `config.json` of a checkpoint directory.

    Raises:
        ModelRefusedError: it cannot be read, or cannot be trained exactly.
    """
    try:
        config: Json = json.loads((model_dir / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelRefusedError(ModelRefusal.NO_CONFIG, str(error)) from error
    if not isinstance(config, dict):
        raise ModelRefusedError(ModelRefusal.NO_CONFIG, "not a JSON object")
    return parse_architecture(config)


def parse_architecture(config: Mapping[str, Json]) -> Architecture:
    """Check a Hugging Face configuration.

    Raises:
        ModelRefusedError: it cannot be trained exactly.
    """
    check_routing(_routing(config))
    model_type = config.get("model_type")
    if model_type not in ("qwen3", "llama"):
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_ARCHITECTURE, f"this is {model_type!r}")
    _check_options(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    return Architecture(
        model_type=str(model_type),
        layer_count=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        head_count=heads,
        group_count=_count(config, "num_key_value_heads"),
        head_size=_count(config, "head_dim") if config.get("head_dim") else hidden // heads,
        vocabulary_size=_count(config, "vocab_size"),
        position_limit=_count(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps"),
        rope_base=_rope_base(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        digest=hashlib.sha256(
            json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest(),
    )


def _routing(config: Mapping[str, Json]) -> Routing | None:
    if not config.get("num_experts") and not config.get("num_local_experts"):
        return None
    capacity = config.get("expert_capacity_factor")
    coefficient = config.get("router_aux_loss_coef") if config.get("output_router_logits") else 0
    return Routing(
        capacity_factor=None if capacity is None else _number(config, "expert_capacity_factor"),
        auxiliary_loss_coefficient=float(coefficient)
        if isinstance(coefficient, int | float)
        else 0,
        per_token=config.get("router_type", "top_k") == "top_k",
    )


def _check_options(config: Mapping[str, Json]) -> None:
    """Refuse options whose effect the Megatron model would silently lack."""
    required: dict[str, tuple[Json, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "attention_dropout": (0, None),
        "quantization_config": (None,),
    }
    for name, allowed in required.items():
        if config.get(name) not in allowed:
            raise ModelRefusedError(
                ModelRefusal.UNSUPPORTED_OPTION, f"{name} is {config.get(name)!r}"
            )


def _rope_base(config: Mapping[str, Json]) -> float:
    """Base of the rotary embedding; old checkpoints keep it at the top level.

    Raises:
        ModelRefusedError: the positions are rescaled.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_OPTION, f"rope_parameters is {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_OPTION, f"rope_type is {kind!r}")
    base = rope.get("rope_theta", config.get("rope_theta", DEFAULT_ROPE_BASE))
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_OPTION, f"rope_theta is {base!r}")
    return float(base)


def _count(config: Mapping[str, Json], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_OPTION, f"{name} is {value!r}")
    return value


def _number(config: Mapping[str, Json], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelRefusedError(ModelRefusal.UNSUPPORTED_OPTION, f"{name} is {value!r}")
    return float(value)
