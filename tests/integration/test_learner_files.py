"""What the learner writes and reads: exports, checkpoints, and the models it refuses."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from callforest_mesh.trainer.batch import (
    plan_step,
)
from callforest_mesh.trainer.learner.architecture import (
    ModelRefusal,
    ModelRefusedError,
    Routing,
    check_routing,
    parse_architecture,
)
from callforest_mesh.trainer.learner.checkpoint import (
    CheckpointRefusal,
    CheckpointRefusedError,
    RunShape,
)
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions, NotLoadedError
from tests.integration.learner_cases import (
    FOUR,
    PACKED,
    assert_same,
    load,
    make_rows,
    weights,
    write_model,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_model(directory, "qwen3")
    return directory


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
    ("changed", "named"),
    [({"forest": False}, "its forest is True"), ({"row_multiple": 8}, "its row_multiple is 4")],
)
def test_a_run_goes_on_only_as_it_captured_and_padded(
    model_dir: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    """Rows before and behind the checkpoint would not be of one run."""
    shape, target = RunShape(forest=True, row_multiple=4), tmp_path / "step-0"
    learner = load(model_dir, shape=shape)
    saved = learner.save(target, trained_cursor=3, weight_version=2)
    assert json.loads((target / "manifest.json").read_text())["schema_version"] == 5
    other = load(model_dir, shape=replace(shape, **changed))
    for refused in (other.restore, partial(other.save, trained_cursor=3, weight_version=2)):
        with pytest.raises(CheckpointRefusedError, match=named) as refusal:
            refused(target)
        assert refusal.value.refusal is CheckpointRefusal.OTHER_RUN
    assert load(model_dir, shape=shape).restore(target) == saved


@pytest.mark.requirement("TRN-7")
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"step": 7}, CheckpointRefusal.CHANGED),
        ({"schema_version": 1}, CheckpointRefusal.OTHER_SCHEMA),
        ({"schema_version": 4}, CheckpointRefusal.OTHER_SCHEMA),
        ({"schema_version": 6}, CheckpointRefusal.OTHER_SCHEMA),
        ({"forest": True}, CheckpointRefusal.CHANGED),
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
