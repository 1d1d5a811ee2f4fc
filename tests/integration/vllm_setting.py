"""One vLLM engine in its own process, two models for it, and how tests ask it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from callforest_mesh.worker.engine import EngineRequest, EngineResult, TokenIds
from callforest_mesh.worker.tiny_model import make_tiny_model
from callforest_mesh.worker.vllm.engine import VllmEngine
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions
from tests.integration.reference_model import Reference

CONTEXT = 1024


@dataclass
class Setting:
    engine: VllmEngine
    old: Reference
    new: Reference
    old_weights: Path
    new_weights: Path
    calls: int = 0

    async def ask(
        self, messages: list[dict], prefix: TokenIds | None = None, **fields: object
    ) -> EngineResult:
        """Ask under a fresh call id."""
        self.calls += 1
        body = {"model": "policy", "messages": messages, "max_tokens": 24, "seed": 5, **fields}
        request = EngineRequest(
            call_id=f"call-{self.calls}",
            created=1_700_000_000 + self.calls,
            body=json.dumps(body).encode(),
            prefix=prefix,
        )
        return await self.engine.generate(request)


@asynccontextmanager
async def running_engine(folder: Path) -> AsyncIterator[Setting]:
    """Run an engine on the first of two models."""
    old, new = (make_tiny_model(folder / str(seed), seed=seed) for seed in (0, 1))
    engine = VllmEngine(
        VllmOptions(model=str(old), dtype="float32", context_token_count=CONTEXT),
        VllmLimits(start_s=300.0, generate_s=120.0, backoff_s=0.1),
    )
    await engine.start()
    try:
        yield Setting(
            engine,
            Reference(old),
            Reference(new),
            old / "model.safetensors",
            new / "model.safetensors",
        )
    finally:
        await engine.stop()


def message_of(result: EngineResult) -> dict:
    return json.loads(result.response)["choices"][0]["message"]


def path_of(result: EngineResult) -> TokenIds:
    """The exact tokens of a call: what its continuation must begin with."""
    return np.concatenate([result.prompt_ids, result.generated_ids])
