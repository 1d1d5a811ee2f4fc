"""The worker's side of the engine's process: what crosses the border, and what becomes of it."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from callforest_core.custody.capture_input import CaptureDecision, HistoryMatch
from callforest_mesh.worker.engine import (
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
    PrefixEvidence,
    TokenIds,
    WeightVersionSpan,
)
from callforest_mesh.worker.vllm.engine import VllmEngine
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions
from tests.processes import gone

CHILD = Path(__file__).with_name("scripted_engine_child.py")
LIMITS = VllmLimits(
    start_s=60.0, generate_s=60.0, load_s=60.0, stop_s=20.0, restarts_most=2, backoff_s=0.05
)


def command(starts: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(CHILD), "--starts", str(starts), *arguments]


@contextlib.asynccontextmanager
async def engine_on(starts: Path, *arguments: str) -> AsyncIterator[VllmEngine]:
    options = VllmOptions(model="none")
    engine = VllmEngine(options, LIMITS, command=command(starts, *arguments))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def pids_of(starts: Path) -> list[int]:
    """The processes that were started, in order."""
    return [int(line) for line in starts.read_text().splitlines()]


@pytest.fixture
def starts(tmp_path: Path) -> Path:
    return tmp_path / "starts"


async def ask(engine: VllmEngine, do: str, prefix: TokenIds | None = None) -> EngineResult:
    body = json.dumps({"do": do}).encode()
    return await engine.generate(EngineRequest("call-1", 1, body, prefix))


async def ask_until_answered(engine: VllmEngine) -> EngineResult:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(EngineUnavailableError):
                return await ask(engine, "answer")
            await asyncio.sleep(0.05)


@pytest.mark.requirement("CAP-5")
async def test_a_result_crosses_the_border_unchanged(starts: Path) -> None:
    prefix = np.array([5, 2**32 - 2], np.uint32)
    async with engine_on(starts) as engine:
        result = await ask(engine, "answer", prefix)
    assert result.prompt_ids.tolist() == prefix.tolist()
    assert result.generated_ids.tolist() == [3, 2**32 - 1]
    assert result.logprobs.tolist() == [-0.5, float(np.float32(-1e-20))]
    assert result.response == b'{"id":"chatcmpl-call-1"}'
    assert (result.finish_reason, result.reported_completion_tokens) == ("stop", 2)
    assert result.weight_version_spans == (WeightVersionSpan(0, 2, 0),)
    expected = {"temperature": 0.5, "seed": None, "top_k": -1, "ignore_eos": False}
    assert result.sampling == expected
    assert [type(result.sampling[name]) for name in expected] == [float, type(None), int, bool]
    assert (result.logprobs_mode, result.prefix_refused) == ("raw_logprobs", "turn_differs")


@pytest.mark.requirement("ADM-5", "CAP-10")
@pytest.mark.parametrize(
    "match", [HistoryMatch.EXACT, HistoryMatch.TOOL_CONTENT_EQUIVALENT, HistoryMatch.UNPROVEN]
)
async def test_evidence_and_decision_cross_the_border(starts: Path, match: HistoryMatch) -> None:
    prefix, chain = np.array([5, 6, 7], np.uint32), bytes(range(32))
    evidence = PrefixEvidence(match, chain)
    decision = CaptureDecision(
        is_spliced=True, prefix_cut=2, render_cut=3, proof=chain, notes=(match.value,)
    )
    body = b'{"do": "answer"}'
    async with engine_on(starts) as engine:
        forest = EngineRequest("call-1", 1, body, prefix, evidence)
        assert (await engine.generate(forest)).decision == decision
        assert await engine.measure(forest) == EngineMeasure(3, decision)
        chain_mode = EngineRequest("call-1", 1, body, prefix)
        assert (await engine.generate(chain_mode)).decision is None
        assert await engine.measure(chain_mode) == EngineMeasure(3)
        with pytest.raises(EngineRefusalError, match="no"):
            await engine.measure(EngineRequest("call-1", 1, b'{"do": "refuse"}'))
    with pytest.raises(EngineUnavailableError):
        await engine.measure(chain_mode)


async def test_failures_cross_the_border_as_themselves(starts: Path) -> None:
    async with engine_on(starts) as engine:
        with pytest.raises(EngineRefusalError, match="no") as refusal:
            await ask(engine, "refuse")
        assert refusal.value.parameter == "do"
        with pytest.raises(EngineRefusalError, match="chat_request"):
            await engine.generate(EngineRequest("call-1", 1, b"", None))
        with pytest.raises(EngineUnavailableError, match="not now"):
            await ask(engine, "fail")
        with pytest.raises(EngineRefusalError, match="another model's"):
            await engine.update_weights("foreign", 1)
        await engine.update_weights("good", 3)
        assert engine.describe().weight_version == 3
        with pytest.raises(ValueError, match="version 3 does not exceed 3"):
            await engine.update_weights("good", 3)


async def test_a_dead_child_is_started_anew_with_the_weights_it_had(starts: Path) -> None:
    async with engine_on(starts) as engine:
        await engine.update_weights("good", 4)
        waiting = asyncio.create_task(ask(engine, "hang"))
        with pytest.raises(EngineUnavailableError):
            await ask(engine, "die")
        with pytest.raises(EngineUnavailableError):
            await waiting
        assert (await ask_until_answered(engine)).weight_version == 4
    assert len(pids_of(starts)) == 2


async def test_a_half_loaded_engine_is_replaced_by_one_with_whole_weights(starts: Path) -> None:
    async with engine_on(starts) as engine:
        await engine.update_weights("good", 4)
        with pytest.raises(EngineUnavailableError, match="half of the weights"):
            await engine.update_weights("broken", 5)
        first = pids_of(starts)[0]
        assert await asyncio.to_thread(gone, first)
        assert (await ask_until_answered(engine)).weight_version == 4
        await engine.update_weights("good", 5)


async def test_a_child_that_keeps_failing_stays_down_and_says_why(starts: Path) -> None:
    async with engine_on(starts, "--fail-from", "2") as engine:
        with pytest.raises(EngineUnavailableError):
            await ask(engine, "die")
        supervision = engine._supervision
        assert supervision is not None
        await asyncio.wait_for(supervision, 60)
        with pytest.raises(EngineUnavailableError, match="these were its last words"):
            await ask(engine, "answer")
    assert len(pids_of(starts)) == 1 + LIMITS.restarts_most


async def test_a_child_that_does_not_start_says_why(starts: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="status 1: these were its last words"):
        async with engine_on(starts, "--fail-from", "1"):
            pass
    engine = VllmEngine(VllmOptions(model="none"), LIMITS, command=[str(starts / "absent")])
    with pytest.raises(EngineUnavailableError, match="cannot be run"):
        await engine.start()
    with pytest.raises(EngineUnavailableError, match="not started"):
        engine.describe()


async def test_stopping_fails_running_calls_and_leaves_nothing_behind(starts: Path) -> None:
    async with engine_on(starts) as engine:
        scratch = engine._require_child()._child._scratch
        assert scratch.is_dir()
        waiting = asyncio.create_task(ask(engine, "hang"))
        await ask(engine, "answer")
        await engine.stop()
        with pytest.raises(EngineUnavailableError):
            await waiting
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await ask(engine, "answer")
    assert await asyncio.to_thread(gone, pids_of(starts)[0])
    assert not scratch.exists()


PARENT = """
import asyncio, sys
from callforest_mesh.worker.vllm.engine import VllmEngine
from callforest_mesh.worker.vllm.options import VllmOptions

async def main():
    engine = VllmEngine(VllmOptions(model="none"), command=sys.argv[1:])
    await engine.start()
    print(engine.child_pid, engine._require_child()._child._scratch, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_child_ends_when_its_parent_is_killed(starts: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(starts)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child, scratch = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
    assert gone(int(child))
    shutil.rmtree(scratch)


def test_options_survive_the_command_line() -> None:
    options = VllmOptions(model="here", dtype="float32", more_arguments=("--swap-space", "0"))
    assert VllmOptions.from_json(options.to_json()) == options
    assert "--enforce-eager" in options.arguments()
    gpu = VllmOptions(model="here", device="gpu")
    assert "--enforce-eager" not in gpu.arguments()
    assert "TORCH_COMPILE_DISABLE" not in gpu.environment(Path("scratch"))
    assert options.environment(Path("scratch"))["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize("fields", [{"device": "tpu"}, {"kv_cache_gib": 0}, {"weight_version": -1}])
def test_options_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        VllmOptions(model="here", **fields)
