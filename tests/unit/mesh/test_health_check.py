"""`callforest health`: what it says of services that serve, that are others, and that are away."""

import asyncio
from pathlib import Path

import pytest

from callforest_mesh.assembly import EmbeddedMesh
from callforest_mesh.chassis.configuration import load
from callforest_mesh.cli import main
from callforest_mesh.terminal import AWAY, DONE, NO, WRONG


async def health(*words: str) -> int:
    return await asyncio.to_thread(main, ["health", *words])


async def test_health_is_what_the_service_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [
        f"state_dir={tmp_path}/state",
        "services=[staging, ledger]",
        f"addresses.staging=unix:{tmp_path}/s",
        f"addresses.ledger=unix:{tmp_path}/l",
    ]
    words = [word for one in settings for word in ("--set", one)]
    assert await health(*words) == AWAY
    assert capsys.readouterr().out.splitlines() == [
        "staging    does not answer",
        "ledger     does not answer",
    ]
    async with EmbeddedMesh(load(environment={}, settings=settings)):
        assert await health(*words) == DONE
        assert await health("ledger", *words) == DONE
        assert "ledger     SERVING" in capsys.readouterr().out
        misled = [*words, "--set", f"addresses.gateway=unix:{tmp_path}/l", "--set"]
        assert await health("gateway", *misled, f"addresses.ledger=unix:{tmp_path}/x") == NO
        assert "gateway    NOT_FOUND" in capsys.readouterr().out
    assert await health("ledger", *words) == AWAY
    assert await health("ledgr", *words) == WRONG
