"""The real learner: Megatron-core on a CPU against transformers' Qwen3 and Llama."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from callforest_mesh.trainer.batch import (
    BatchMode,
    BatchOptions,
    BatchRefusal,
    BatchRefusedError,
    TrainingRow,
    plan_step,
)
from callforest_mesh.trainer.learner.architecture import (
    ModelRefusal,
    ModelRefusedError,
    Routing,
    check_routing,
    parse_architecture,
)
from callforest_mesh.trainer.learner.checkpoint import CheckpointRefusal, CheckpointRefusedError
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions, NotLoadedError
from callforest_mesh.trainer.learner.loss import LossOptions, Metric
from callforest_mesh.trainer.learner.optimizer import NonFiniteStepError, OptimizerOptions
from callforest_mesh.trainer.learner.weights import to_hugging_face

pytestmark = pytest.mark.engine

VOCABULARY = 96
RATE = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1)


def write_model(directory: Path, kind: str, **changes: Any) -> Any:
    """Write a tiny random checkpoint; give transformers' own model of it."""
    import transformers

    torch.manual_seed(7)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "dtype": "float32",
    } | changes
    config, model = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    made = model(config(**common)).float().eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:  # norms begin at 1, which would hide one that is never loaded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    made.save_pretrained(directory)
    return made


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_model(directory, "qwen3")
    return directory


def load(model_dir: Path, **options: Any) -> Learner:
    learner = Learner(LearnerOptions(**({"optimizer": RATE} | options)))
    learner.load(model_dir)
    return learner


def make_rows(count: int = 6) -> list[TrainingRow]:
    chance = np.random.default_rng(3)
    rows = []
    for index in range(count):
        length = int(chance.integers(4, 20))
        mask = chance.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(
            TrainingRow(
                row_id=f"row-{index}",
                rollout_id=f"rollout-{index // 2}",
                token_ids=chance.integers(0, VOCABULARY, length).astype(np.uint32),
                loss_mask=mask,
                logprobs=(-3 * chance.random(length)).astype(np.float32),
                advantage=float(chance.normal()),
            )
        )
    return rows


def with_own_logprobs(learner: Learner, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    result = []
    for row in rows:
        (scores,) = learner.score([row], plan_step([row], BatchOptions()))
        logprobs = np.zeros_like(row.logprobs)
        logprobs[row.loss_mask] = scores.numpy()
        result.append(replace(row, logprobs=logprobs))
    return result


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in learner.policy.weights().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


SINGLE, FOUR = BatchOptions(BatchMode.FIXED, 1), BatchOptions(BatchMode.FIXED, 4)
PACKED = BatchOptions(BatchMode.PACKED, train_microbatch_tokens=40)


def accumulate(learner: Learner, rows: list[TrainingRow], options: BatchOptions) -> Any:
    """The gradient of one step, Hugging Face names; seen before it is clipped and applied."""
    seen: dict[str, Tensor] = {}
    policy, optimizer = learner._require()
    apply = optimizer.apply

    def spy(loss: float) -> float:
        seen.update(
            {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
        )
        return apply(loss)

    optimizer.apply = spy  # type: ignore[method-assign]  # a spy
    metrics = learner.step(rows, plan_step(rows, options))
    return to_hugging_face(seen, policy.architecture), metrics


@pytest.mark.requirement("TRN-1")
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("qwen3", True), ("llama", False)])
def test_logits_and_gradients_are_those_of_transformers(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    reference = write_model(tmp_path, kind, tie_word_embeddings=tied)
    learner = load(tmp_path)
    rows = make_rows()
    count = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros(())
    expected_scores = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = reference(ids[None]).logits[0, :-1]
        scores = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        scores = scores[torch.from_numpy(row.loss_mask[1:])]
        expected_scores.append(scores.detach())
        sampled = torch.from_numpy(row.logprobs[row.loss_mask])
        weight = (scores.detach() - sampled).exp()
        loss = loss - (row.advantage * weight * (scores - scores.detach()).exp()).sum() / count
    loss.backward()

    for row, expected in zip(rows, expected_scores, strict=True):
        (scores,) = learner.score([row], plan_step([row], SINGLE))
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    gradients, metrics = accumulate(learner, rows, FOUR)

    assert metrics.means[Metric.LOSS] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-2


@pytest.mark.requirement("TRN-1", "TRN-5")
def test_the_gradient_does_not_depend_on_the_cut(model_dir: Path) -> None:
    rows = make_rows(8)
    single, one = accumulate(load(model_dir), rows, SINGLE)
    for options in (FOUR, PACKED):
        gradients, metrics = accumulate(load(model_dir), rows, options)
        assert metrics.microbatch_count < one.microbatch_count
        for metric in Metric:
            assert metrics.means[metric] == pytest.approx(one.means[metric], rel=1e-5, abs=1e-7)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, single[name], atol=2e-6, rtol=1e-4)


@pytest.mark.requirement("TRN-5")
def test_a_masked_row_weighs_nothing_and_changes_only_the_denominator(model_dir: Path) -> None:
    rows = make_rows(4)
    masked = [*rows[:3], replace(rows[3], valid=False)]
    whole, _ = accumulate(load(model_dir), masked, FOUR)
    without, _ = accumulate(load(model_dir), rows[:3], FOUR)
    all_rows, full = accumulate(load(model_dir), rows, FOUR)
    only, alone = accumulate(load(model_dir), rows[3:], FOUR)

    metrics = load(model_dir).step(masked, plan_step(masked, FOUR))
    assert (metrics.step, metrics.row_count, metrics.masked_row_count) == (1, 4, 1)
    assert metrics.masked_token_count == alone.retained_token_count
    kept = metrics.retained_token_count
    assert kept + alone.retained_token_count == full.retained_token_count
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, without[name], atol=1e-6, rtol=1e-4)
        joined = gradient * kept + only[name] * alone.retained_token_count
        torch.testing.assert_close(
            all_rows[name] * full.retained_token_count, joined, atol=1e-4, rtol=1e-4
        )


@pytest.mark.requirement("TRN-9")
def test_metrics_are_ideal_on_the_learners_own_logprobs(model_dir: Path) -> None:
    learner = load(model_dir)
    rows = with_own_logprobs(learner, make_rows())
    means = learner.step(rows, plan_step(rows, SINGLE)).means
    assert means[Metric.TOKEN_MULT_PROB_ERROR] == 1.0
    assert means[Metric.GEN_KL_ERROR] == 0.0
    assert means[Metric.POLICY_KL_ERROR] == 0.0
    assert means[Metric.SAMPLING_IMPORTANCE_RATIO] == 1.0
    assert means[Metric.PROBS_RATIO] == 1.0


def test_a_step_raises_what_earned_and_lowers_what_did_not(model_dir: Path) -> None:
    learner = load(model_dir)
    rows = with_own_logprobs(learner, make_rows(2))
    rows = [replace(rows[0], advantage=1.0), replace(rows[1], advantage=-1.0)]
    plan = plan_step(rows, SINGLE)
    before = [float(scores.sum()) for scores in learner.score(rows, plan)]
    for _ in range(3):
        learner.step(rows, plan)
    after = [float(scores.sum()) for scores in learner.score(rows, plan)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert learner.step_count == 3


def test_a_learning_rate_of_zero_changes_no_bit(model_dir: Path) -> None:
    learner = load(model_dir, optimizer=OptimizerOptions(learning_rate=0.0, weight_decay=0.1))
    before = weights(learner)
    metrics = learner.step(rows := make_rows(), plan_step(rows, FOUR))
    assert metrics.gradient_norm > 0
    assert_same(weights(learner), before)


def test_what_a_row_does_not_train_cannot_poison_the_step(model_dir: Path) -> None:
    rows = make_rows(3)
    poisoned = [
        replace(row, logprobs=np.where(row.loss_mask, row.logprobs, np.float32(np.nan)))
        for row in rows
    ]
    clean, dirty = load(model_dir), load(model_dir)
    clean.step(rows, plan_step(rows, FOUR))
    dirty.step(poisoned, plan_step(poisoned, FOUR))
    assert_same(weights(dirty), weights(clean))


@pytest.mark.parametrize(("quantity", "huge"), [("loss", 3e38), ("gradient norm", 1e30)])
def test_a_step_that_is_not_finite_is_not_made(model_dir: Path, quantity: str, huge: float) -> None:
    learner = load(model_dir)
    rows = make_rows(3)
    plan = plan_step(rows, FOUR)
    learner.step(rows, plan)
    before, state = weights(learner), learner._require()[1].tensors()
    state = {name: tensor.clone() for name, tensor in state.items()}
    broken = [replace(row, advantage=huge) for row in rows]
    with pytest.raises(NonFiniteStepError) as refusal:
        learner.step(broken, plan)
    assert refusal.value.quantity == quantity
    assert learner.step_count == 1
    assert_same(weights(learner), before)
    assert_same(learner._require()[1].tensors(), state)
    learner.step(rows, plan)
    undisturbed = load(model_dir)
    undisturbed.step(rows, plan)
    undisturbed.step(rows, plan)
    assert_same(weights(learner), weights(undisturbed))


@pytest.mark.requirement("TRN-10")
def test_the_export_has_the_checkpoints_names_types_and_bits(tmp_path: Path) -> None:
    for kind, dtype in (("qwen3", torch.float32), ("llama", torch.bfloat16)):
        source = tmp_path / kind
        made = write_model(source, kind)
        made.to(dtype).save_pretrained(source)
        learner = load(source)
        size = learner.export(target := tmp_path / f"{kind}.safetensors")
        exported, original = load_file(target), load_file(source / "model.safetensors")
        assert_same(exported, original)
        assert {w.dtype for w in exported.values()} == {dtype}
        assert size == target.stat().st_size
        learner.step(rows := make_rows(), plan_step(rows, FOUR))
        learner.export(target)
        changed = load_file(target)
        assert changed.keys() == original.keys()
        assert not any(torch.equal(changed[n], original[n]) for n in original if "proj" in n)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.requirement("TRN-7")
def test_a_restored_learner_continues_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    rows, target = make_rows(), tmp_path / "step-2"
    plan = plan_step(rows, PACKED)
    first = load(model_dir)
    first.step(rows, plan)
    first.step(rows, plan)
    saved = first.save(target, trained_cursor=41, weight_version=5)
    assert first.save(target, trained_cursor=41, weight_version=5) == saved
    first.step(rows, plan)

    second = load(model_dir)
    assert second.restore(target) == saved
    assert (saved.step, saved.trained_cursor, saved.weight_version) == (2, 41, 5)
    assert second.step(rows, plan).step == 3
    assert_same(weights(second), weights(first))
    assert_same(second._require()[1].tensors(), first._require()[1].tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.requirement("TRN-7")
def test_a_checkpoint_is_never_overwritten_and_never_taken_changed(
    model_dir: Path, tmp_path: Path
) -> None:
    rows, target = make_rows(), tmp_path / "step-1"
    learner = load(model_dir)
    learner.step(rows, plan_step(rows, FOUR))
    learner.save(target, trained_cursor=1, weight_version=1)
    with pytest.raises(CheckpointRefusedError) as refusal:
        learner.save(target, trained_cursor=2, weight_version=1)
    assert refusal.value.refusal is CheckpointRefusal.EXISTS

    other = load(model_dir)
    before = weights(other)
    for name, expected in (
        ("weights.safetensors", CheckpointRefusal.CHANGED),
        ("optimizer.safetensors", CheckpointRefusal.CHANGED),
        ("generators.safetensors", CheckpointRefusal.CHANGED),
    ):
        copy = tmp_path / f"changed-{name}"
        shutil.copytree(target, copy)
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(CheckpointRefusedError, match=name) as refusal:
            other.restore(copy)
        assert refusal.value.refusal is expected
    assert_same(weights(other), before)
    assert other.step_count == 0


@pytest.mark.requirement("TRN-7")
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"step": 7}, CheckpointRefusal.CHANGED),
        ({"schema_version": 2}, CheckpointRefusal.OTHER_SCHEMA),
        (None, CheckpointRefusal.ABSENT),
        ("{", CheckpointRefusal.MALFORMED),
        ("[]", CheckpointRefusal.MALFORMED),
    ],
)
def test_manifests_that_cannot_be_trusted_are_refused(
    model_dir: Path, tmp_path: Path, edit: Any, expected: CheckpointRefusal
) -> None:
    learner = load(model_dir)
    learner.save(tmp_path / "step-0", trained_cursor=0, weight_version=0)
    manifest = tmp_path / "step-0" / "manifest.json"
    if edit is None:
        manifest.unlink()
    elif isinstance(edit, str):
        manifest.write_text(edit)
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | edit))
    with pytest.raises(CheckpointRefusedError) as refusal:
        learner.restore(tmp_path / "step-0")
    assert refusal.value.refusal is expected


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "wider", "qwen3", intermediate_size=64)
    other = load(tmp_path / "wider")
    other.save(tmp_path / "step-0", trained_cursor=0, weight_version=0)
    with pytest.raises(CheckpointRefusedError) as refusal:
        load(model_dir).restore(tmp_path / "step-0")
    assert refusal.value.refusal is CheckpointRefusal.OTHER_MODEL


@pytest.mark.requirement("TRN-2")
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model_type": "mamba"}, ModelRefusal.UNSUPPORTED_ARCHITECTURE),
        ({"model_type": "qwen3_moe", "num_experts": 8}, ModelRefusal.UNSUPPORTED_ARCHITECTURE),
        ({"num_experts": 8, "expert_capacity_factor": 1.0}, ModelRefusal.MOE_CAPACITY_LIMIT),
        (
            {"num_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.01},
            ModelRefusal.MOE_AUXILIARY_LOSS,
        ),
        ({"num_experts": 8, "router_type": "expert_choice"}, ModelRefusal.MOE_ROUTING),
        ({"attention_bias": True}, ModelRefusal.UNSUPPORTED_OPTION),
        ({"hidden_act": "gelu"}, ModelRefusal.UNSUPPORTED_OPTION),
        ({"use_sliding_window": True}, ModelRefusal.UNSUPPORTED_OPTION),
        ({"rope_parameters": {"rope_type": "yarn"}}, ModelRefusal.UNSUPPORTED_OPTION),
        ({"num_hidden_layers": 0}, ModelRefusal.UNSUPPORTED_OPTION),
        ({"num_hidden_layers": 3}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"num_hidden_layers": 1}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"intermediate_size": 50}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"hidden_size": 31}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"num_key_value_heads": 4}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"vocab_size": 95}, ModelRefusal.WEIGHTS_MISMATCH),
        ({"model_type": "llama"}, ModelRefusal.WEIGHTS_MISMATCH),
    ],
)
def test_a_checkpoint_that_cannot_be_trained_exactly_is_refused_before_any_step(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any], refusal: ModelRefusal
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model_dir, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    learner = Learner(LearnerOptions())
    with pytest.raises(ModelRefusedError) as refused:
        learner.load(copy)
    assert refused.value.refusal is refusal
    with pytest.raises(NotLoadedError):
        _ = learner.policy


@pytest.mark.requirement("TRN-2")
def test_dense_and_dropless_routing_pass() -> None:
    check_routing(None)
    check_routing(Routing(None, 0.0, per_token=True))


def test_broken_files_are_refused(model_dir: Path, tmp_path: Path) -> None:
    for name, content in (("config.json", b"{"), ("model.safetensors", b"no header")):
        copy = tmp_path / name
        shutil.copytree(model_dir, copy)
        (copy / name).write_bytes(content)
        with pytest.raises(ModelRefusedError):
            Learner(LearnerOptions()).load(copy)
    with pytest.raises(ModelRefusedError):
        Learner(LearnerOptions()).load(tmp_path / "absent")


def test_old_and_new_places_of_the_rotary_base_agree(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_architecture(config).rope_base == 5e5
    del config["rope_parameters"]
    assert parse_architecture(config | {"rope_theta": 5e5}).rope_base == 5e5


def test_rows_the_model_cannot_take_are_refused_by_name(model_dir: Path) -> None:
    learner = load(model_dir)
    row = make_rows(1)[0]
    alien = replace(row, token_ids=np.full_like(row.token_ids, VOCABULARY))
    long = replace(
        row,
        token_ids=np.zeros(65, np.uint32),
        loss_mask=np.arange(65) > 0,
        logprobs=np.zeros(65, np.float32),
    )
    for refused, expected in (
        (alien, BatchRefusal.OUT_OF_VOCABULARY),
        (long, BatchRefusal.ROW_TOO_LONG),
    ):
        with pytest.raises(BatchRefusedError) as refusal:
            learner.step([refused], plan_step([refused], SINGLE))
        assert (refusal.value.refusal, refusal.value.row_id) == (expected, row.row_id)
    with pytest.raises(BatchRefusedError) as refusal:
        learner.step([row], plan_step([row], BatchOptions(rank_count=2)))
    assert refusal.value.refusal is BatchRefusal.PLAN_MISMATCH


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        LearnerOptions(loss=LossOptions(kl_coefficient=0.1))
    for wrong in ({"learning_rate": -1.0}, {"clip_grad_norm": 0.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match=r"is|are"):
            OptimizerOptions(**wrong)  # type: ignore[arg-type]  # one number at a time
