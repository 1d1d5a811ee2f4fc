"""Keys of a GRPO configuration that this mesh knows by the names of the design (CFG-1, TRN-6).

Such a file may be used as it is: a key whose value is what this mesh does anyway is accepted, one
that asks for something else is refused at the start with the reason, one that means what an option
here means is that option, and one that differs in form names the option to write. None of them is
read by anything else, so nothing is dropped in silence.

Source: seed 1, "Configuration and supported scope".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from callforest_mesh.chassis.configuration_section import (
    ConfigurationError,
    Value,
    dotted,
    unknown_key,
)

SECTIONS: Final = ("policy", "grpo", "loss_fn", "async_rl", "data")
"""The sections that hold such keys alone."""


@dataclass(frozen=True, slots=True)
class FixedKey:
    """A key that can have one value here.

    Attributes:
        key: with dots.
        allowed: its values, all of which mean the same.
        why: the reason for refusing another.
    """

    key: str
    allowed: tuple[Value, ...]
    why: str


@dataclass(frozen=True, slots=True)
class MovedKey:
    """A key whose effect is to be had by another.

    Attributes:
        key: with dots.
        harmless: values that ask for what happens without it.
        instead: what to write.
    """

    key: str
    harmless: tuple[Value, ...]
    instead: str


@dataclass(frozen=True, slots=True)
class SameKey:
    """A key that means what an option here means: its value is that option's.

    Attributes:
        key: with dots.
        option: section and name of the option.
    """

    key: str
    option: tuple[str, str]


_PER_ROLLOUT: Final = (
    "a rollout has one reward and one advantage, however many rows it was cut into"
)
FIXED: Final = (
    FixedKey("policy.megatron_cfg.enabled", (True,), "the learner is Megatron-core"),
    FixedKey(
        "policy.megatron_cfg.num_layers_per_virtual_pipeline_stage",
        (None,),
        "interleaved pipelines are not supported",
    ),
    FixedKey("policy.automodel_cfg.enabled", (False,), "the learner is Megatron-core"),
    FixedKey(
        "policy.dynamic_batching.enabled",
        (False,),
        "batches are fixed, or packed into bins by a token budget",
    ),
    FixedKey(
        "token_capture.defer_routed_experts_to_policy", (False,), "routes are assembled at once"
    ),
    FixedKey(
        "grpo.calculate_advantages_on_gpu",
        (False,),
        "advantages are computed over whole prompt groups before rows are dealt to ranks",
    ),
    FixedKey(
        "grpo.reward_shaping.enabled", (False,), f"reward shaping would break it: {_PER_ROLLOUT}"
    ),
    FixedKey("grpo.reward_penalties", (None,), f"a penalty a row would break it: {_PER_ROLLOUT}"),
    FixedKey("grpo.message_level_advantages", (False, None), _PER_ROLLOUT),
    FixedKey(
        "grpo.seq_logprob_error_threshold",
        (None,),
        "this release reports the error and excludes nothing by it",
    ),
    FixedKey(
        "loss_fn.token_level_loss",
        (True,),
        "a mean over rows would weigh a token by how its rollout was cut into rows",
    ),
    FixedKey(
        "loss_fn.sequence_level_importance_ratios",
        (False,),
        "the ratio of a row would depend on how its rollout was cut into rows",
    ),
    FixedKey(
        "loss_fn.sequence_mask", (None, False), "a mask a row would depend on how rows were cut"
    ),
    FixedKey("data.loss_multiplier", (1, 1.0, None), "every owned token weighs the same"),
    FixedKey(
        "async_rl.rollout_failure.redispatch",
        (None, False, 0),
        "a failed group is dropped; what selected its calls is gone with its requests",
    ),
)
MOVED: Final = (
    MovedKey("token_capture.context_compaction", (), "token_capture.forest_training"),
    MovedKey("policy.sequence_packing.enabled", (False,), "trainer.batch.mode: packed"),
    MovedKey("policy.train_micro_batch_size", (), "trainer.batch.train_microbatch_size"),
    MovedKey("grpo.advantage_clip_low", (None,), "trainer.advantages.clip_low"),
    MovedKey("grpo.advantage_clip_high", (None,), "trainer.advantages.clip_high"),
    MovedKey("grpo.overlong_filtering", (False,), "trainer.advantages.overlong_filtering"),
    MovedKey("grpo.masked_reward_policy", (), "trainer.advantages.masked_reward_policy"),
)
SAME: Final = (
    # The part of a step's groups that must be kept; with less training stops.
    SameKey(
        "async_rl.rollout_failure.min_step_batch_fraction", ("trainer", "min_step_batch_fraction")
    ),
)
_KNOWN: Final = tuple(one.key for one in (*FIXED, *MOVED, *SAME))


def take_training_keys(tree: dict[str, Value]) -> None:
    """Check such keys of a configuration and take them out of it, or to where they are read.

    Args:
        tree: the configuration as it was read; changed.

    Raises:
        ConfigurationError: a key is not known, its value asks for what is not done here, or the
            option that it means says something else.
    """
    for section in SECTIONS:
        values = tree.pop(section, None)
        for key, value in _leaves(section, {} if values is None else values):
            _check(key, value, tree)
    capture = tree.get("token_capture")
    if isinstance(capture, dict):
        for name in [name for name in capture if f"token_capture.{name}" in _KNOWN]:
            _check(f"token_capture.{name}", capture.pop(name), tree)


def _check(key: str, value: Value, tree: dict[str, Value]) -> None:
    for fixed in FIXED:
        if fixed.key == key:
            if not _is_one_of(value, fixed.allowed):
                allowed = " or ".join(repr(one) for one in fixed.allowed)
                raise ConfigurationError(key, f"must be {allowed}, not {value!r}: {fixed.why}")
            return
    for moved in MOVED:
        if moved.key == key:
            if not _is_one_of(value, moved.harmless):
                raise ConfigurationError(
                    key, f"is {moved.instead} here; rename it and keep its value"
                )
            return
    for same in SAME:
        if same.key == key:
            _put(same, value, tree)
            return
    where, _, name = key.rpartition(".")
    within = [one for one in _KNOWN if one.startswith(f"{where}.")]
    raise unknown_key(name, [one[len(where) + 1 :] for one in within], where)


def _put(same: SameKey, value: Value, tree: dict[str, Value]) -> None:
    """Give an option the value of the key that means it; its own schema judges the value."""
    if value is None:
        return
    name, option = same.option
    section = tree.get(name)
    if section is None:
        section = tree[name] = {}
    if not isinstance(section, dict):
        return  # refused as no section
    if option in section and section[option] != value:
        raise ConfigurationError(
            same.key,
            f"is {value!r}, but {name}.{option}, which means the same, {section[option]!r}",
        )
    section[option] = value


def _leaves(where: str, values: Value) -> list[tuple[str, Value]]:
    """Give the keys of a section that are known as such or hold no section, with their values."""
    if not isinstance(values, dict):
        raise ConfigurationError(where, f"must be a section with keys, not {values!r}")
    leaves: list[tuple[str, Value]] = []
    for name, value in values.items():
        key = dotted(where, name)
        is_section = isinstance(value, Mapping) and any(
            known.startswith(f"{key}.") for known in _KNOWN
        )
        leaves += _leaves(key, value) if is_section else [(key, value)]
    return leaves


def _is_one_of(value: Value, allowed: tuple[Value, ...]) -> bool:
    """Compare without taking true for 1."""
    return any(type(value) is type(one) and value == one for one in allowed)
