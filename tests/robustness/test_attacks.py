"""What a hostile harness or a hostile network tried, and what must come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.first_path_mesh import (
    GO,
    FirstPathMesh,
    running_mesh,
    scripted,
    spoken,
    turn,
)

INSERTED = {"role": "user", "content": "some"}
NEXT = {"role": "user", "content": "Hi"}


async def _rows(mesh: FirstPathMesh, capture_key: str) -> tuple[int, list[str]]:
    manifest = await mesh.manifest(capture_key)
    return len(manifest.records), [failure.reason for failure in manifest.failures]


@pytest.mark.requirement("ADM-1", "ADM-6")
async def test_a_turn_put_before_an_answer_is_shown_to_the_model(tmp_path: Path) -> None:
    """The captured tokens do not hold it; placed over the history they would hide it."""
    async with running_mesh(tmp_path, scripted(turn(5, 4), turn(6, 4)), local=True) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        spoken(await mesh.ask(key, GO, INSERTED, answer, NEXT))
        assert mesh.prompts()[1] == [1, 20, 2, 1, 30, 2, 3, 5, 4, 1, 40, 2, 3]
        assert await _rows(mesh, key) == (1, ["unresolved_parent"])


@pytest.mark.requirement("ADM-1", "ADM-6")
async def test_a_text_as_input_cannot_be_exchanged_for_another(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, scripted(turn(5, 4), turn(6, 4)), local=True) as mesh:
        key = await mesh.open()
        output = (await mesh.respond(key, "go")).json()["output"]
        other = {"role": "user", "content": "some"}
        assert (await mesh.respond(key, [other, *output, NEXT])).status_code == 200
        assert mesh.prompts()[1] == [1, 30, 2, 3, 5, 4, 1, 40, 2, 3]
        assert await _rows(mesh, key) == (1, ["unresolved_parent"])


@pytest.mark.requirement("ADM-1")
async def test_a_text_as_input_is_the_message_that_it_becomes(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, scripted(turn(5, 4), turn(6, 4)), local=True) as mesh:
        key = await mesh.open()
        output = (await mesh.respond(key, "go")).json()["output"]
        parts = [{"type": "input_text", "text": "go"}]
        turns = [{"type": "message", "role": "user", "content": parts}, *output, NEXT]
        assert (await mesh.respond(key, turns)).status_code == 200
        assert await _rows(mesh, key) == (2, [])
