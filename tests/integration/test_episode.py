"""An environment that is no Gym drives real finalization and cleanup (SEL-7)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.episode import Episode, EpisodeError
from callforest_client.errors import RefusedError
from callforest_client.rollout import RolloutOwner
from tests.integration.finalizer_mesh import FinalizerMesh, take
from tests.integration.forest_mesh import ForestPlayer
from tests.integration.offline_rows import verify_offline


@pytest.fixture(params=["socket", "local"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, request.param)
    await mesh.start()
    yield mesh
    await mesh.stop()


class Maze:
    """A maze that is played by a model: it names its moves, and only some of them stand."""

    def __init__(self, mesh: FinalizerMesh, rollout_id: str) -> None:
        self.player = ForestPlayer(mesh, rollout_id)
        self.owner = RolloutOwner(mesh.admission, mesh.ledger, mesh.finalizer, "http://localhost")

    async def play(self) -> Episode:
        """Three moves, the second of them taken back, and a walk from another door."""
        episode = await Episode.begin(self.owner, self.player.rollout_id)
        self.player.key = episode.capture_key
        moves = (
            ("north", None),
            ("into-the-wall", "north"),
            ("east", "north"),
            ("other-door", None),
        )
        for move, before in moves:
            call = f"call-of-{move}"
            await self.player.call(call, before and f"call-of-{before}")
            episode.played(f"move/{move}", f"chatcmpl-{call}")
        return episode


@pytest.mark.requirement("SEL-7")
async def test_action_ids_and_a_score_become_rows_and_are_cleaned_away(
    mesh: FinalizerMesh,
) -> None:
    maze = Maze(mesh, "r0")
    episode = await maze.play()
    assert episode.base_url == "http://localhost/rollouts/r0/v1"
    receipt = await episode.finish(
        ["move/north", "move/east", "move/other-door"],
        0.75,
        group_id="g",
        slot=0,
        scored_action_id="move/east",
    )
    assert (receipt.masked, receipt.reward) == (False, 0.75)
    assert (receipt.terminal_call_id, receipt.selection_policy) == ("call-of-east", "explicit")
    reasons = {call.call_id: call.reason for call in receipt.calls}
    assert reasons["call-of-into-the-wall"] == "not_chosen"
    published = await maze.owner.publish("g", 1)
    assert list(published.row_ids) == ["g_g0_s0", "g_g0_s1"]
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    verify_offline(batch)
    assert [
        [batch.segments[span.segment_index].call_id for span in row.spans] for row in batch.rows
    ] == [["call-of-north", "call-of-east"], ["call-of-other-door"]]
    assert len(await maze.player.staged_ids()) == 4
    await rows.commit(1)
    await mesh.cleaned()
    assert await maze.player.staged_ids() == []


@pytest.mark.requirement("SEL-7")
async def test_what_cannot_be_translated_finalizes_nothing(mesh: FinalizerMesh) -> None:
    maze = Maze(mesh, "r0")
    episode = await maze.play()
    for stood, scored, why in (
        ([], None, "no action"),
        (["move/up"], None, "never played: move/up"),
        (["move/north", "move/north"], None, "stood twice: move/north"),
        (["move/north"], "move/east", "did not stand: move/east"),
    ):
        with pytest.raises(EpisodeError, match=why):
            await episode.finish(stood, 1.0, group_id="g", slot=0, scored_action_id=scored)
    with pytest.raises(EpisodeError, match="another answer: move/north"):
        episode.played("move/north", "chatcmpl-call-of-east")
    episode.played("move/dreamt", "chatcmpl-nobody")
    with pytest.raises(RefusedError) as caught:
        await episode.finish(["move/dreamt"], 1.0, group_id="g", slot=0)
    assert caught.value.reason == er.ERROR_REASON_SELECTION_REFUSED
    assert caught.value.metadata["fault"] == "policy_unknown"
    receipt = await episode.finish(["move/east"], 1.0, group_id="g", slot=0)
    assert (receipt.masked, receipt.mask_reason) == (True, "selection_not_closed")
