"""A child process that serves a scripted engine: what `VllmEngine` supervises, without vLLM.

Each start appends a line to the file given by `--starts`; with `--fail-from N` the Nth start and
all later ones fail.
"""

import argparse
import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from callforest_core.custody.capture_input import CaptureDecision
from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
    WeightVersionSpan,
)
from callforest_mesh.worker.vllm.child import serve


class ScriptedChildEngine:
    """Does what the request's field "do" says."""

    def __init__(self, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._version = 0
        self.broken = ""

    async def start(self) -> EngineDescription:
        return self.describe()

    async def stop(self) -> None:
        pass

    def describe(self) -> EngineDescription:
        return EngineDescription("scripted", "policy", 64, self._version, bytes(32))

    async def generate(self, request: EngineRequest) -> EngineResult:
        match json.loads(request.body)["do"]:
            case "refuse":
                raise EngineRefusalError("no", parameter="do")
            case "fail":
                raise EngineUnavailableError("not now")
            case "die":
                os._exit(7)
            case "hang":
                await asyncio.Event().wait()
        prompt = np.array([1, 2], np.uint32) if request.prefix is None else request.prefix
        return EngineResult(
            prompt_ids=prompt,
            generated_ids=np.array([3, 2**32 - 1], np.uint32),
            logprobs=np.array([-0.5, -1e-20], np.float32),
            response=b'{"id":"chatcmpl-%s"}' % request.call_id.encode(),
            finish_reason="stop",
            reported_completion_tokens=2,
            weight_version=self._version,
            weight_version_spans=(WeightVersionSpan(0, 2, self._version),),
            sampling={"temperature": 0.5, "seed": None, "top_k": -1, "ignore_eos": False},
            logprobs_mode="raw_logprobs",
            prefix_refused="turn_differs",
            decision=decision_on(request),
        )

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        if json.loads(request.body)["do"] == "refuse":
            raise EngineRefusalError("no", parameter="do")
        size = 2 if request.prefix is None else len(request.prefix)
        return EngineMeasure(size, decision_on(request))

    async def update_weights(self, path: str, version: int) -> None:
        if version <= self._version:
            raise ValueError(f"version {version} does not exceed {self._version}")
        if path == "broken":
            self.broken = "half of the weights are loaded"
            self._on_broken()
            raise EngineUnavailableError(self.broken)
        if path == "foreign":
            raise EngineRefusalError("another model's", parameter="path")
        self._version = version


def decision_on(request: EngineRequest) -> CaptureDecision | None:
    """Give back what came as evidence."""
    if request.evidence is None:
        return None
    return CaptureDecision(
        is_spliced=True,
        prefix_cut=2,
        render_cut=3,
        proof=request.evidence.chain_hash,
        notes=(request.evidence.match.value,),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--starts", type=Path)
    parser.add_argument("--fail-from", type=int, default=1000)
    arguments = parser.parse_args()
    with arguments.starts.open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if len(arguments.starts.read_text().splitlines()) >= arguments.fail_from:
        sys.exit("these were its last words")
    sys.exit(asyncio.run(serve(arguments.socket, functools.partial(ScriptedChildEngine))))


if __name__ == "__main__":
    main()
