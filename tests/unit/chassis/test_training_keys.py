"""What the design forbids is refused at the start, with its reason; the rest is accepted."""

from pathlib import Path

import pytest
import yaml

from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.token_capture import TokenCapture
from callforest_mesh.mesh_options import check_all, trainer_options

pytestmark = pytest.mark.requirement("CFG-1")

# Seed 1, "Configuration and supported scope", letter for letter.
DESIGN = """\
token_capture:
  enabled: true
  forest_training: true
  selection_policy: returned_history
  defer_routed_experts_to_policy: false
policy:
  megatron_cfg:
    enabled: true
  automodel_cfg:
    enabled: false
  sequence_packing:
    enabled: false
  dynamic_batching:
    enabled: false
grpo:
  calculate_advantages_on_gpu: false
loss_fn:
  token_level_loss: true
  sequence_level_importance_ratios: false
async_rl:
  rollout_failure:
    min_step_batch_fraction: 1  # Optional floor; drop budgets must also permit losses.
"""
FLOOR = "async_rl.rollout_failure.min_step_batch_fraction"


def test_the_overrides_of_the_design_are_valid_together(tmp_path: Path) -> None:
    file = tmp_path / "design.yaml"
    file.write_text(DESIGN)
    settings = ["worker.engine=scripted", f"trainer.model_path={tmp_path}"]
    read = load(file, environment={}, settings=settings)
    check_all(read)
    assert read.token_capture == TokenCapture(forest_training=True)
    assert trainer_options(read).min_step_batch_fraction == 1.0


@pytest.mark.parametrize(
    "harmless",
    [
        "grpo.overlong_filtering=false",
        "grpo.reward_penalties=null",
        "async_rl.rollout_failure.redispatch=false",
    ],
)
def test_a_key_that_asks_for_what_is_done_anyway_is_accepted(harmless: str) -> None:
    assert load(environment={}, settings=[harmless]) == load(environment={})


@pytest.mark.requirement("FIN-7")
@pytest.mark.parametrize(("written", "meant"), [("0.5", 0.5), ("1", 1.0), ("null", None)])
def test_the_floor_of_a_step_is_the_trainers_option(
    written: str, meant: float | None, tmp_path: Path
) -> None:
    model = f"trainer.model_path={tmp_path}"
    for also in ([], [f"trainer.min_step_batch_fraction={written}"]):
        read = load(environment={}, settings=[model, f"{FLOOR}={written}", *also])
        assert trainer_options(read).min_step_batch_fraction == meant


def test_a_floor_that_is_told_twice_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"which means the same, 0\.75") as caught:
        load(environment={}, settings=[f"{FLOOR}=0.5", "trainer.min_step_batch_fraction=0.75"])
    assert caught.value.key == FLOOR
    read = load(environment={}, settings=[f"trainer.model_path={tmp_path}", f"{FLOOR}=1.5"])
    with pytest.raises(ConfigurationError, match="min_step_batch_fraction must be above 0"):
        trainer_options(read)


def test_without_a_section_attempts_are_of_chain_mode() -> None:
    assert not load(environment={}).token_capture.forest_training


@pytest.mark.requirement("TRN-6")
@pytest.mark.parametrize(
    ("setting", "key", "words"),
    [
        ("token_capture.context_compaction=true", "token_capture.context_compaction",
         "token_capture.forest_training here; rename it and keep its value"),
        ("token_capture.context_compaction=false", "token_capture.context_compaction", "rename"),
        ("token_capture.enabled=false", "token_capture", "no mesh without capture"),
        ("token_capture.selection_policy=all_captured", "token_capture", "needs forest_training"),
        ("token_capture.selection_policy=a.b:c", "token_capture", "needs forest_training"),
        ("token_capture.selection_policy=latest", "token_capture", "package.module:function"),
        ("token_capture.min_valid_fraction_per_group=0.5", "token_capture",
         "needs forest_training"),
        ("token_capture.min_valid_fraction_per_group=0", "token_capture", "above 0"),
        ("token_capture.min_valid_fraction_per_group=1.5", "token_capture", "at most 1"),
        ("token_capture.incomplete_capture=train_verified_paths", "token_capture",
         "needs forest_training"),
        ("token_capture.incomplete_capture=salvage", "token_capture.incomplete_capture",
         "must be one of 'mask', 'train_verified_paths'"),
        ("token_capture.forrest_training=true", "token_capture.forrest_training",
         "did you mean 'forest_training'?"),
        ("token_capture.defer_routed_experts_to_policy=true",
         "token_capture.defer_routed_experts_to_policy", "assembled at once"),
        ("policy.megatron_cfg.enabled=false", "policy.megatron_cfg.enabled", "Megatron-core"),
        ("policy.megatron_cfg.num_layers_per_virtual_pipeline_stage=2",
         "policy.megatron_cfg.num_layers_per_virtual_pipeline_stage", "interleaved"),
        ("policy.automodel_cfg.enabled=true", "policy.automodel_cfg.enabled", "Megatron-core"),
        ("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.enabled", "token budget"),
        ("policy.sequence_packing.enabled=true", "policy.sequence_packing.enabled",
         "trainer.batch.mode: packed"),
        ("policy.train_micro_batch_size=4", "policy.train_micro_batch_size",
         "trainer.batch.train_microbatch_size"),
        ("policy.dynamic_batching=true", "policy.dynamic_batching", "did you mean"),
        ("grpo.calculate_advantages_on_gpu=true", "grpo.calculate_advantages_on_gpu",
         "prompt groups"),
        ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.enabled", "one reward"),
        ("grpo.reward_penalties=[1.0]", "grpo.reward_penalties", "one reward"),
        ("grpo.message_level_advantages=true", "grpo.message_level_advantages", "one advantage"),
        ("grpo.seq_logprob_error_threshold=2.0", "grpo.seq_logprob_error_threshold", "excludes"),
        ("grpo.advantage_clip_low=-1", "grpo.advantage_clip_low", "trainer.advantages.clip_low"),
        ("grpo.masked_reward_policy=include", "grpo.masked_reward_policy",
         "trainer.advantages.masked_reward_policy"),
        ("grpo.overlong_filtering=true", "grpo.overlong_filtering",
         "trainer.advantages.overlong_filtering here; rename it and keep its value"),
        ("grpo.calculate_advantage_on_gpu=false", "grpo.calculate_advantage_on_gpu",
         "did you mean 'calculate_advantages_on_gpu'?"),
        ("loss_fn.token_level_loss=false", "loss_fn.token_level_loss", "cut into rows"),
        ("loss_fn.token_level_loss=1", "loss_fn.token_level_loss", "must be True"),
        ("loss_fn.sequence_level_importance_ratios=true",
         "loss_fn.sequence_level_importance_ratios", "cut into rows"),
        ("loss_fn.sequence_mask=true", "loss_fn.sequence_mask", "how rows were cut"),
        ("data.loss_multiplier=2", "data.loss_multiplier", "weighs the same"),
        ("async_rl.rollout_failure.redispatch=true", "async_rl.rollout_failure.redispatch",
         "dropped"),
        ("grpo=1", "grpo", "must be a section"),
    ],
)  # fmt: skip
def test_every_combination_that_the_design_forbids_names_its_reason(
    setting: str, key: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(environment={}, settings=[setting])
    assert caught.value.key == key
    assert words in str(caught.value)


@pytest.mark.parametrize("policy", ["returned_history", "all_captured", "my_harness.training:pick"])
def test_every_policy_goes_with_forest_training(policy: str) -> None:
    settings = ["token_capture.forest_training=true", f"token_capture.selection_policy={policy}"]
    assert load(environment={}, settings=settings).token_capture.selection_policy == policy


def test_yaml_variables_and_flags_meet_in_one_section(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"token_capture": {"forest_training": False}}))
    environment = {"CALLFOREST_TOKEN_CAPTURE__FOREST_TRAINING": "true"}
    settings = ["token_capture.min_valid_fraction_per_group=0.75"]
    read = load(file, environment=environment, settings=settings).token_capture
    assert (read.forest_training, read.min_valid_fraction_per_group) == (True, 0.75)
