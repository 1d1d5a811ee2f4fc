"""An output layer that is tied to the embedding follows a weight update as every layer does."""

import json
from pathlib import Path

import numpy as np
import pytest

from callforest_mesh.worker.engine import EngineRequest
from callforest_mesh.worker.tiny_model import make_tiny_model
from callforest_mesh.worker.vllm.engine import VllmEngine
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions
from tests.integration.reference_model import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def make_tied(directory: Path, seed: int) -> Path:
    """Write a tiny checkpoint without an output layer of its own."""
    from safetensors.torch import load_file, save_file

    make_tiny_model(directory, seed=seed)
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return directory


@pytest.mark.requirement("TRN-10")
async def test_a_tied_output_layer_gets_the_new_weights(tmp_path: Path) -> None:
    versions = [make_tied(tmp_path / str(seed), seed) for seed in (0, 1, 2)]
    engine = VllmEngine(
        VllmOptions(model=str(versions[0]), dtype="float32"),
        VllmLimits(start_s=300.0, generate_s=120.0),
    )
    body = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "max_tokens": 16}
    await engine.start()
    try:
        for version, directory in enumerate(versions):
            if version:
                await engine.update_weights(str(directory), version)
            request = EngineRequest(f"call-{version}", 1, json.dumps(body).encode())
            result = await engine.generate(request)
            assert result.weight_version == version
            expected = Reference(directory).logprobs(result.prompt_ids, result.generated_ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, rtol=0)
    finally:
        await engine.stop()
