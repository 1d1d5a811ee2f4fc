"""One configuration, two ways to run: all services in this process, or each in its own."""

import asyncio
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from callforest_mesh import inspection
from callforest_mesh.chassis.configuration import SERVICES
from callforest_mesh.worker.tiny_model import make_tiny_model
from tests.integration.running_mesh import play, roll_out, running


async def command(*words: str) -> tuple[int, str]:
    """Run a command in a process of its own; give its status and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "callforest_mesh.cli", *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.requirement("API-2")
@pytest.mark.parametrize("kind", ["embedded", "processes"])
async def test_a_rollout_runs_on_the_same_configuration(kind: str, tmp_path: Path) -> None:
    async with running(kind, tmp_path) as mesh:
        receipt = await roll_out(mesh, "r1")
        assert not receipt.masked, receipt
        assert [call.selected for call in receipt.calls] == [True] * 3
        lines, status = await asyncio.to_thread(
            inspection.show, mesh.configuration, "r1", tmp_path / "calls.svg"
        )
        assert status == 0
        text = "\n".join(lines)
        assert text.count("  trains") == 4, "three calls and the receipt"
        assert all(call.call_id in text for call in receipt.calls)
        assert receipt.digest.hex() in text
        drawing = ET.parse(tmp_path / "calls.svg").getroot()
        assert len([one for one in drawing.iter() if one.get("class") == "loss"]) == 3
        lines, status = await asyncio.to_thread(inspection.verify, mesh.configuration, "r1")
        assert (lines, status) == (
            [
                f"intact: 3 calls on 1 paths, the longest of {receipt.total_token_count} tokens",
            ],
            0,
        )


async def test_a_running_attempt_can_be_looked_at(tmp_path: Path) -> None:
    async with running("embedded", tmp_path) as mesh:
        rollout = await mesh.owner.open("r1")
        assert await command("verify", "r1", *mesh.arguments) == (1, "nothing was committed\n")
        await play(rollout.base_url, 1)
        status, out = await command("verify", "r1", *mesh.arguments)
        assert status == 0
        assert out.startswith("intact: 1 calls on 1 paths")
        status, out = await command("show", "r1", *mesh.arguments)
        assert status == 0
        assert "attempt r1  open" in out
        again = await mesh.owner.open("r1")
        assert again.capture_key == "r1-a1"
        lines, _ = await asyncio.to_thread(inspection.show, mesh.configuration, "r1")
        assert "attempt r1  sealed" in lines[0]
        assert "superseded" in lines[0]
        assert any(line.startswith("attempt r1-a1  open") for line in lines)
        lines, _ = await asyncio.to_thread(inspection.show, mesh.configuration, "r1-a1")
        assert len([line for line in lines if line.startswith("attempt")]) == 1
        assert (await command("show", "nobody", *mesh.arguments))[0] == 1


async def test_what_was_captured_survives_another_way_to_run(tmp_path: Path) -> None:
    async with running("embedded", tmp_path) as mesh:
        first = await roll_out(mesh, "r1")
    async with running("processes", tmp_path) as mesh:
        assert await mesh.clients.finalizer().receipt("r1") == first
        await roll_out(mesh, "r2")


@pytest.mark.requirement("API-2")
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["embedded", "processes"])
async def test_the_trainer_runs_with_the_others(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    every = (f"services=[{', '.join(SERVICES)}]", f"trainer.model_path={model}")
    async with running(kind, tmp_path, *every) as mesh:
        status = await mesh.clients.trainer().status()
        assert status.step == 0  # nothing was published
        assert not (await roll_out(mesh, "r1")).masked
