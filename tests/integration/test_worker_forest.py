"""Calls of forest mode over the worker's streams, with a real store behind it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from callforest.capture.v1 import capture_admission_pb2 as admission_pb
from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import staged_call_from_proto
from callforest_client.errors import CallforestError
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker.chat_text import Message
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import (
    FirstPathMesh,
    TurnTemplate,
    WordVocabulary,
    running_mesh,
    turn,
)
from tests.unit.worker.played_staging import behind, call_of

pytestmark = pytest.mark.timeout(60)

WORDS = WordVocabulary({20: "go", 21: "on", 30: "yes", 50: "<think>", 51: "hm", 52: "</think>"})
GO, ON = {"role": "user", "content": "go"}, {"role": "user", "content": "on"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>yes"}
TIMEOUT_S = 20.0


class ThinklessTemplate(TurnTemplate):
    """Leaves reasoning out of every answer but one that ends the conversation."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        shown = [
            {**message, "content": str(message["content"]).rpartition("</think>")[2]}
            for message in messages[:-1]
        ]
        return super().render([*shown, messages[-1]], add_generation_prompt=add_generation_prompt)


def thinking() -> ScriptedEngine:
    turns = [turn(50, 51, 52, 30, 4), turn(30, 4), turn(30, 4)]
    return ScriptedEngine(
        vocabulary=WORDS,
        template=ThinklessTemplate(WORDS),
        script=lambda _prompt, _call_id, ordinal: turns[ordinal],
    )


def forest_call(
    *messages: object, call_id: str, after: pb.GeneratedCall | None = None, match: int = 1
) -> pb.GenerateCall:
    position = None
    if after is not None:
        position = behind(after.staged)
        position.match = match
    call = call_of(*messages, call_id=call_id, position=position)
    call.admission.is_forest = True
    return call


async def staged_of(mesh: FirstPathMesh, *call_ids: str) -> list[list[int]]:
    calls = await mesh.staging.fetch("k", list(call_ids))
    return [staged_call_from_proto(call).token_ids.tolist() for call in calls]


@pytest.mark.requirement("ADM-5", "ADM-6", "CAP-10")
@pytest.mark.bugcase("B02")
@pytest.mark.parametrize("local", [True, False], ids=["in process", "sockets"])
async def test_a_spliced_continuation_and_its_measure(tmp_path: Path, *, local: bool) -> None:
    engine = thinking()
    async with running_mesh(tmp_path, engine, local=local) as mesh:
        first = await mesh.worker.generate(forest_call(GO, call_id="a"), timeout_s=TIMEOUT_S)
        call = forest_call(GO, ANSWER, ON, call_id="b", after=first)
        measured = await mesh.worker.measure(call, timeout_s=TIMEOUT_S)
        assert len(engine.prompts) == 1
        with pytest.raises(CallforestError):
            await staged_of(mesh, "b")
        second = await mesh.worker.generate(call, timeout_s=TIMEOUT_S)
        spliced = [1, 20, 2, 3, 50, 51, 52, 30, 4, 1, 21, 2, 3]
        assert mesh.prompts() == [[1, 20, 2, 3], spliced]
        assert measured == pb.MeasuredCall(
            prompt_token_count=len(spliced), decision=second.decision
        )
        assert second.decision.input == admission_pb.CAPTURE_INPUT_SPLICED
        assert list(second.decision.notes) == ["template_truncated_reasoning"]
        assert (second.staged.parent_call_id, second.staged.prev_token_count) == ("a", 9)
        assert await staged_of(mesh, "a", "b") == [
            [1, 20, 2, 3, 50, 51, 52, 30, 4],
            [1, 21, 2, 3, 30, 4],
        ]
        usage = json.loads(second.chat_response)["usage"]
        assert usage["prompt_tokens"] == measured.prompt_token_count


@pytest.mark.requirement("ADM-5")
async def test_a_fresh_root_is_kept_as_one(tmp_path: Path) -> None:
    engine = thinking()
    async with running_mesh(tmp_path, engine, local=True) as mesh:
        first = await mesh.worker.generate(forest_call(GO, call_id="a"), timeout_s=TIMEOUT_S)
        call = forest_call(GO, ANSWER, ON, ANSWER, GO, call_id="b", after=first)
        second = await mesh.worker.generate(call, timeout_s=TIMEOUT_S)
        assert second.decision.input == admission_pb.CAPTURE_INPUT_ROOT
        assert second.decision.reason == "turn_count_differs"
        assert not second.staged.HasField("parent_call_id")
        (kept,) = await staged_of(mesh, "b")
        assert kept == [1, 20, 2, 3, 30, 4, 1, 21, 2, 3, 30, 4, 1, 20, 2, 3, 30, 4]
        # The whole attempt is two contexts: neither row inherits from the other.
        assert second.staged.prev_token_count == 0


@pytest.mark.requirement("ADM-4", "CAP-11")
async def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    engine = thinking()
    async with running_mesh(tmp_path, engine, local=True) as mesh:
        first = await mesh.worker.generate(forest_call(GO, call_id="a"), timeout_s=TIMEOUT_S)
        unproven = forest_call(GO, ANSWER, ON, call_id="b", after=first, match=0)
        changed = forest_call(GO, call_id="c")
        changed.configuration_digest = bytes(32)
        for call, reason in [
            (unproven, er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF),
            (changed, er.ERROR_REASON_CONFIGURATION_CHANGED),
        ]:
            for ask in (mesh.worker.generate, mesh.worker.measure):
                with pytest.raises(CallforestError) as refused:
                    await ask(call, timeout_s=TIMEOUT_S)
                assert refused.value.reason == reason
                assert refused.value.metadata["capture_key"] == "k"
        described = await mesh.worker.describe()
        assert refused.value.metadata["actual"] == described.configuration_digest.hex()
        assert len(engine.prompts) == 1
