"""From a harness's request to a durable, token-free row: real services, an unmodified SDK."""

import asyncio
import hashlib
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from callforest.capture.v1 import attempt_pb2, completion_pb2
from callforest_client.codec import call_record_from_proto, staged_call_from_proto
from callforest_client.errors import RefusedError
from callforest_core.custody.call import Receipt
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import verify_and_linearize
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.integration.first_path_mesh import (
    GO,
    WORDS,
    FirstPathMesh,
    running_mesh,
    scripted,
    spoken,
    turn,
)


@pytest.fixture
def mesh(mesh_of_each_kind: FirstPathMesh) -> FirstPathMesh:
    """On sockets, embedded, and in processes."""
    return mesh_of_each_kind


async def row_of(mesh: FirstPathMesh, capture_key: str) -> LinearizedRow:
    """Verify an attempt and join the path to its last call."""
    manifest = await mesh.manifest(capture_key)
    records = [call_record_from_proto(record) for record in manifest.records]
    calls = await mesh.staging.fetch(capture_key, [record.call_id for record in records])
    receipt = Receipt(
        capture_key=capture_key,
        manifest=tuple(records),
        terminal_call_id=records[-1].call_id,
        capture_poisoned=bool(manifest.failures),
        terminal_selection="declared",
    )
    return verify_and_linearize(receipt, [staged_call_from_proto(call) for call in calls])


@pytest.mark.requirement("ADM-6", "CAP-1", "CAP-5", "CAP-6")
@pytest.mark.bugcase("B01")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("worker", [{}, {"prefix_cache_bytes": 0}])
async def test_sampled_ids_replace_their_re_tokenisation(
    local: bool, worker: dict[str, object], tmp_path: Path
) -> None:
    """Whether the predecessor's tokens are still in memory or come from the store."""
    engine = scripted(turn(10, 11, 4), turn(30, 4))
    assert WORDS.encode("HAVING").tolist() == [12, 13]
    async with running_mesh(tmp_path, engine, local=local, worker=worker) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            first = await client.chat.completions.create(model="m", messages=[GO])
            assert first.choices[0].message.content == "HAVING"
            history = [GO, {"role": "assistant", "content": "HAVING"}, GO]
            second = await client.chat.completions.create(model="m", messages=history)
            assert second.choices[0].message.content == "some"
        assert mesh.prompts() == [[1, 20, 2, 3], [1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3]]
        row = await row_of(mesh, key)
    assert row.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3, 30, 4]
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert row.logprobs[4:7].tolist() == np.array([-0.1, -0.2, -0.3], np.float32).tolist()


@pytest.mark.requirement("CAP-4", "CAP-6", "LED-13")
async def test_record_is_of_the_call_that_was_served(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    response = await mesh.ask(key, GO)
    call_id = response.headers["x-callforest-call-id"]
    assert float(response.headers["x-callforest-overhead-ms"]) >= 0
    manifest = await mesh.manifest(key)
    (record,) = manifest.records
    assert not manifest.failures
    assert not manifest.attempt.pending_call_ids
    assert (record.coords.call_id, record.coords.capture_key) == (call_id, key)
    assert record.response_id == response.json()["id"] == f"chatcmpl-{call_id}"
    assert record.admit_time.seconds == response.json()["created"]
    assert record.completion.generation_token_count == response.json()["usage"]["completion_tokens"]
    (staged,) = await mesh.staging.fetch(key, [call_id])
    assert staged.served_response == response.content
    assert staged.digest == record.coords.digest


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_byte_is_measured(tmp_path: Path, stream: bool) -> None:
    """From the whole request to the first byte: the generation, and what capture adds to it."""
    generation_ms, tick_ms = 200, 2  # the loop's clock goes by milliseconds
    engine = ScriptedEngine(ScriptedOptions(latency_s=(generation_ms / 1000, generation_ms / 1000)))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        begun = time.perf_counter()
        response = await mesh.ask(key, GO, stream=stream)
        waited_ms = (time.perf_counter() - begun) * 1000
    first_byte_ms = float(response.headers["x-callforest-ttfb-ms"])
    overhead_ms = float(response.headers["x-callforest-overhead-ms"])
    assert generation_ms - tick_ms <= first_byte_ms <= waited_ms + tick_ms
    assert overhead_ms <= first_byte_ms - generation_ms + tick_ms
    assert first_byte_ms - overhead_ms <= waited_ms + tick_ms


@pytest.mark.requirement("CAP-4")
async def test_calls_of_an_attempt_overlap(tmp_path: Path) -> None:
    """Each has an intent before any has generated."""
    together = asyncio.Barrier(8)

    async def pause(_call_id: str) -> None:
        await together.wait()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        asked = [{"role": "user", "content": f"question {number}"} for number in range(8)]
        responses = await asyncio.gather(*(mesh.ask(key, message) for message in asked))
        assert {response.status_code for response in responses} == {200}
        manifest = await mesh.manifest(key)
    assert len({record.coords.call_id for record in manifest.records}) == 8
    assert not manifest.failures


@pytest.mark.bugcase("B07")
async def test_terminator_that_the_template_adds_has_no_loss(tmp_path: Path) -> None:
    engine = scripted(turn(30, 31, finish_reason="length"), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 31, 4, 1, 20, 2, 3]
        cut, _ = (await mesh.manifest(key)).records
        row = await row_of(mesh, key)
    assert cut.completion.status == completion_pb2.COMPLETION_STATUS_INCOMPLETE
    assert cut.completion.finish_reason == "length"
    assert cut.completion.generation_token_count == 2
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert row.logprobs[6] == 0


@pytest.mark.bugcase("B07")
async def test_terminator_that_was_sampled_stands_once(tmp_path: Path) -> None:
    engine = scripted(turn(30, 31, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 31, 4, 1, 20, 2, 3]
        row = await row_of(mesh, key)
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.bugcase("B07")
async def test_tokens_do_not_merge_over_the_turns_end(tmp_path: Path) -> None:
    engine = scripted(turn(40, 41, 4), turn(30, 4), after_turn="\n\n")
    assert WORDS.encode("Hi!\n\n").tolist() == [40, 99]
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        assert answer["content"] == "Hi!"
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 40, 41, 4, 98, 98, 1, 20, 2, 3]


async def test_large_conversation_travels_in_frames(tmp_path: Path) -> None:
    engine = ScriptedEngine(
        ScriptedOptions(context_token_count=8 << 20),
        script=lambda *_: ScriptedTurn([65, 257], [-0.5, -0.5]),
    )
    long = {"role": "user", "content": "x" * (3 << 20)}
    # Without memory for it, the predecessor's tokens travel too.
    async with running_mesh(tmp_path, engine, worker={"prefix_cache_bytes": 0}) as mesh:
        key = await mesh.open()
        first = await mesh.ask(key, long)
        assert spoken(await mesh.ask(key, long, spoken(first), GO))
        manifest = await mesh.manifest(key)
    assert len(manifest.records) == 2, manifest.failures
    assert manifest.records[1].coords.prev_token_count > 3 << 20
    assert manifest.records[1].coords.delta_token_count < 100


@pytest.mark.requirement("CAP-8")
async def test_weights_pushed_during_a_call_leave_its_version(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_mesh(tmp_path, engine) as mesh:
        file = tmp_path / "v3.safetensors"
        file.write_bytes(b"weights")
        key = await mesh.open()
        with pytest.raises(RefusedError, match="another digest"):
            await mesh.worker.update_weights(str(file), 3, bytes(32))
        await push(mesh, file, 3)
        await mesh.ask(key, GO)

        async def pause(_call_id: str) -> None:
            engine.pause = None
            await push(mesh, file, 4)

        engine.pause = pause
        await mesh.ask(key, {"role": "user", "content": "other"})
        records = (await mesh.manifest(key)).records
    assert [one.coords.weight_version for one in records] == [3, 3]
    assert [one.completion.weight_version_count for one in records] == [1, 2]


async def push(mesh: FirstPathMesh, file: Path, version: int) -> None:
    digest = hashlib.sha256(file.read_bytes()).digest()
    assert await mesh.worker.update_weights(str(file), version, digest) == version


@pytest.mark.requirement("CAP-4")
async def test_attempts_are_named_by_the_server(mesh: FirstPathMesh) -> None:
    assert [await mesh.open("named") for _ in range(3)] == ["named", "named-a1", "named-a2"]
    repeated = str(uuid.uuid4())
    first = await mesh.admission.open_attempt("again", request_id=repeated)
    again = await mesh.admission.open_attempt("again", request_id=repeated)
    assert first.capture_key == again.capture_key == "again"
    assert first.state == attempt_pb2.ATTEMPT_STATE_OPEN
