"""Bad input to the learner's own process, which only the trainer that started it can reach.

ExportWeights and SaveCheckpoint are left out: they write wherever their caller says, and here that
would be anywhere.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

import grpc.aio
import pytest

from callforest_mesh.worker.tiny_model import make_tiny_model
from tests.robustness.fuzz_rpc import RpcFuzz, Tally, methods
from tests.robustness.fuzz_seeds import Seeds

MESSAGES = 400
READING = ("LoadModel", "TrainStep", "RestoreCheckpoint")
START_S = 120.0


@pytest.mark.engine
@pytest.mark.requirement("API-6")
async def test_the_learner_survives_bad_input(tmp_path: Path) -> None:
    model = await asyncio.to_thread(make_tiny_model, tmp_path / "model", seed=1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callforest_mesh.trainer.learner.child"),
        *("--socket", str(tmp_path / "s")),
        stdin=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    channel = grpc.aio.insecure_channel(f"unix:{tmp_path}/s")
    try:
        async with asyncio.timeout(START_S):
            await channel.channel_ready()
        tally = await _fuzz(channel, model, tmp_path)
        assert process.returncode is None
    finally:
        await channel.close()
        assert process.stdin
        process.stdin.close()
        status = await process.wait()
    print("RESULT " + json.dumps({"messages": tally.messages, **tally.answers}))
    assert (tally.faults, status) == ([], 0)
    assert {"OK", "INVALID_MESSAGE", "LEARNER_FAILED", "TRAINER_CONFIGURATION"} <= set(
        tally.answers
    )


async def _fuzz(channel: grpc.aio.Channel, model: Path, directory: Path) -> Tally:
    chance, tally = random.Random(0), Tally()
    facts = {
        "model_path": [str(model), str(model), "/nowhere", str(directory)],
        "path": [str(directory / "none"), str(directory), "/nowhere/x", "."],
        "token_ids": [b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\xff\xff\xff\xff" * 3, b"abc", b""],
        "loss_mask": [b"\0\1\1", b"\1\1\1", b"\2\0\0", b""],
        "logprobs": [b"\0\0\0\0" + b"\0\0\0\xbf" * 2, b"\0\0\xc0\x7f" * 3, b"ab", b""],
        "row_indexes": [0, 1, 2, 2**32 - 1],
    }
    seeds = Seeds(chance, facts, {})
    fuzz = RpcFuzz({"learner": channel}, chance, seeds, seeds, tally)
    own = [
        method
        for method in methods()
        if method.server == "learner" and method.descriptor.name in READING
    ]
    assert len(own) == len(READING)
    while tally.messages < MESSAGES:
        for method in own:
            await fuzz.send(method, fuzz.messages(method))
    return tally
