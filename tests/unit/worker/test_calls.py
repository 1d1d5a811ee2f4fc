"""The life of a call on the worker, on a scripted engine and a store played by hand."""

import asyncio
import json

import grpc
import numpy as np
import pytest

from callforest.capture.v1 import (
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
    item_pb2,
)
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import coords_of, ids_to_bytes, staged_call_from_proto
from callforest_client.errors import RefusedError, UnavailableError
from callforest_core.custody.digests import chain_hash
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.validation import check
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.unit.worker.played_staging import CONTEXT, USER, PlayedStaging, behind, call_of

PARENT_IDS = np.array([1, 2, 3], np.uint32)
PARENT = chain_hash(None, PARENT_IDS)


async def calls_on(
    staging: PlayedStaging, engine: ScriptedEngine | None = None, **options: object
) -> Calls:
    engine = engine or ScriptedEngine()
    await engine.start()
    return Calls(engine, staging, WorkerOptions("unused", **options))


def text_of(generated: pb.GeneratedCall) -> str:
    content: str = json.loads(generated.chat_response)["choices"][0]["message"]["content"]
    return content


@pytest.mark.requirement("CAP-5", "CAP-6")
async def test_call_is_generated_staged_and_proven() -> None:
    staging, engine = PlayedStaging(), ScriptedEngine()
    calls = await calls_on(staging, engine)
    generated = await calls.generate(CONTEXT, call_of())
    (message,) = staging.calls
    check(message)
    assert staging.tenants == ["t"]
    assert generated.staged == coords_of(message)
    assert message.served_response == generated.chat_response
    assert message.completion == generated.completion
    staged = staged_call_from_proto(message)
    prompt = engine.prompts[0].token_ids
    assert staged.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert generated.generation_us >= 0


async def test_call_without_admission_is_served_and_not_staged() -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging)
    generated = await calls.generate(CONTEXT, call_of(captured=False))
    assert generated.WhichOneof("capture") is None
    assert generated.completion.finish_reason == "stop"
    assert not staging.calls


@pytest.mark.requirement("ADM-6")
async def test_continuation_of_a_call_made_here_needs_no_fetch() -> None:
    staging, engine = PlayedStaging(), ScriptedEngine()
    calls = await calls_on(staging, engine)
    first = await calls.generate(CONTEXT, call_of(call_id="a"))
    answer = {"role": "assistant", "content": text_of(first)}
    call = call_of(USER, answer, USER, call_id="b", position=behind(first.staged))
    second = await calls.generate(CONTEXT, call)
    assert second.staged.parent_call_id == "a"
    assert second.staged.prev_token_count == first.staged.delta_token_count
    assert not staging.queries


@pytest.mark.requirement("ADM-6")
async def test_continuation_of_a_call_made_elsewhere_fetches_what_is_missing() -> None:
    elsewhere, staging = PlayedStaging(), PlayedStaging()
    other = await calls_on(elsewhere)
    first = await other.generate(CONTEXT, call_of(call_id="a"))
    answer = {"role": "assistant", "content": text_of(first)}
    call = call_of(USER, answer, USER, call_id="b", position=behind(first.staged))
    second = await other.generate(CONTEXT, call)
    history = [USER, answer, USER, {"role": "assistant", "content": text_of(second)}, USER]
    here = await calls_on(staging)
    deltas = [
        staging_pb.PrefixDelta(call_id=one.call_id, token_ids=one.canonical.token_ids)
        for one in elsewhere.calls
    ]
    staging.prefix = staging_pb.Prefix(deltas=deltas)
    third = call_of(*history, call_id="c", position=behind(second.staged))
    generated = await here.generate(CONTEXT, third)
    assert generated.WhichOneof("capture") == "staged", generated.failed
    assert generated.staged.parent_call_id == "b"
    (query,) = staging.queries
    assert (query.capture_key, query.call_id, list(query.held_call_ids)) == ("k", "b", [])
    # A sibling finds the fetched sequence in memory.
    sibling = call_of(*history, call_id="d", position=behind(second.staged))
    assert (await here.generate(CONTEXT, sibling)).HasField("staged")
    assert len(staging.queries) == 1


async def test_fetch_names_what_is_held_and_builds_on_it() -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging)
    first = await calls.generate(CONTEXT, call_of(call_id="a"))
    held = staged_call_from_proto(staging.calls[0])
    added = np.array([10, 256, 120, 257], np.uint32)
    staging.prefix = staging_pb.Prefix(
        held_call_id="a",
        deltas=[staging_pb.PrefixDelta(call_id="b", token_ids=ids_to_bytes(added))],
    )
    position = capture_admission_pb2.Continuation(
        parent_call_id="b",
        prev_token_count=len(held.token_ids) + 4,
        parent_chain_hash=chain_hash(first.staged.chain_hash, added),
    )
    answer = {"role": "assistant", "content": text_of(first)}
    other = {"role": "assistant", "content": "x"}
    generated = await calls.generate(CONTEXT, call_of(USER, answer, other, USER, position=position))
    assert list(staging.queries[0].held_call_ids) == ["a"]
    assert generated.staged.prev_token_count == position.prev_token_count, generated.failed


def unavailable(reason: er.ErrorReason.ValueType) -> UnavailableError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone", reason=reason)


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(
    "answer",
    [
        unavailable(er.ERROR_REASON_ITEM_DEADLINE),
        RefusedError(grpc.StatusCode.DATA_LOSS, "no", reason=er.ERROR_REASON_PREFIX_BROKEN),
        staging_pb.Prefix(),
        staging_pb.Prefix(held_call_id="never held"),
        staging_pb.Prefix(deltas=[staging_pb.PrefixDelta(call_id="p", token_ids=b"\x01\x02")]),
        staging_pb.Prefix(
            deltas=[staging_pb.PrefixDelta(call_id="p", token_ids=ids_to_bytes(PARENT_IDS + 1))]
        ),
        staging_pb.Prefix(
            deltas=[
                staging_pb.PrefixDelta(call_id="p0", token_ids=ids_to_bytes(PARENT_IDS[:1])),
                staging_pb.PrefixDelta(call_id="p", token_ids=ids_to_bytes(PARENT_IDS[1:])),
            ]
        ),
    ],
)
async def test_prefix_that_is_not_the_recorded_one_is_never_used(
    answer: staging_pb.Prefix | Exception,
) -> None:
    """Neither is the call captured as a root: it is rendered plainly, and served."""
    staging, engine = PlayedStaging(), ScriptedEngine()
    staging.prefix = answer
    calls = await calls_on(staging, engine)
    position = capture_admission_pb2.Continuation(
        parent_call_id="p", prev_token_count=3, parent_chain_hash=PARENT
    )
    history = [USER, {"role": "assistant", "content": "x"}, USER]
    generated = await calls.generate(CONTEXT, call_of(*history, position=position))
    assert generated.failed.reason == "prefix_unavailable"
    assert text_of(generated)
    assert not staging.calls
    plain = engine.template.render(history, add_generation_prompt=True)
    assert engine.prompts[0].token_ids.tolist() == plain.tolist()


@pytest.mark.requirement("CAP-7")
@pytest.mark.bugcase("B08", "B10")
@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (ScriptedTurn([65, 66, 257], [-0.1] * 3, reported_count=57), "count_mismatch"),
        (ScriptedTurn([65] * 57, [-0.1] * 56), "count_mismatch"),
        (ScriptedTurn([65, 66, 257], [-0.5, -np.inf, np.nan]), "non_finite_logprob"),
        (ScriptedTurn([], [], message={"content": ""}), "empty_generation"),
    ],
)
async def test_engine_that_lost_count_is_served_without_capture(
    turn: ScriptedTurn, reason: str
) -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging, ScriptedEngine(script=lambda *_: turn))
    generated = await calls.generate(CONTEXT, call_of())
    assert generated.failed.reason == reason
    assert json.loads(generated.chat_response)["id"] == "chatcmpl-c"
    assert not staging.calls


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (unavailable(er.ERROR_REASON_ITEM_DEADLINE), "stage_timeout"),
        (unavailable(er.ERROR_REASON_PEER_UNAVAILABLE), "stage_failed"),
        (
            RefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason=er.ERROR_REASON_STORE_FULL
            ),
            "stage_failed",
        ),
        (KeyError("a fault"), "stage_failed"),
        (staging_pb.StagedReceipt(), "stage_failed"),
    ],
)
async def test_store_that_fails_does_not_take_the_completion(
    fault: staging_pb.StagedReceipt | Exception, reason: str
) -> None:
    staging = PlayedStaging()
    staging.receipt = fault
    calls = await calls_on(staging)
    generated = await calls.generate(CONTEXT, call_of())
    assert generated.failed.reason == reason
    assert "a fault" not in generated.failed.detail.replace("a fault of the worker", "")
    assert text_of(generated)


@pytest.mark.requirement("CAP-7")
async def test_a_call_that_staging_would_refuse_is_not_generated() -> None:
    """The first to learn of it is served without capture; a call without admission goes on."""
    staging, engine = PlayedStaging(), ScriptedEngine()
    staging.receipt = RefusedError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "full",
        reason=er.ERROR_REASON_STORE_FULL,
        metadata={"store": "staging"},
        retry_after_ms=60_000,
    )
    calls = await calls_on(staging, engine)
    assert (await calls.generate(CONTEXT, call_of())).failed.reason == "stage_failed"
    with pytest.raises(Refusal) as caught:
        await calls.generate(CONTEXT, call_of(call_id="d"))
    assert caught.value.reason == er.ERROR_REASON_STORE_FULL
    assert len(engine.prompts) == 1
    await calls.generate(CONTEXT, call_of(captured=False))


async def test_lost_race_serves_the_winner_and_keeps_nothing_of_its_own() -> None:
    staging = PlayedStaging()
    won = commit_coords_pb2.CommitCoords(capture_key="k", call_id="a", delta_token_count=5)
    completion = completion_pb2.Completion(
        status=completion_pb2.COMPLETION_STATUS_INCOMPLETE, finish_reason="length"
    )
    winner = staging_pb.StagedWinner(served_response=b'{"id":"first"}', completion=completion)
    staging.receipt = staging_pb.StagedReceipt(coords=won, winner=winner)
    calls = await calls_on(staging)
    generated = await calls.generate(CONTEXT, call_of(call_id="a"))
    assert generated.chat_response == b'{"id":"first"}'
    assert generated.completion == completion
    assert generated.staged == won
    # Its own tokens are not what a child would inherit.
    staging.prefix = unavailable(er.ERROR_REASON_ITEM_DEADLINE)
    position = capture_admission_pb2.Continuation(
        parent_call_id="a", prev_token_count=5, parent_chain_hash=bytes(32)
    )
    await calls.generate(CONTEXT, call_of(call_id="b", position=position))
    assert len(staging.queries) == 1


async def test_cancelled_item_ends_the_generation() -> None:
    paused = asyncio.Event()

    async def pause(_call_id: str) -> None:
        paused.set()
        await asyncio.Event().wait()

    engine = ScriptedEngine(pause=pause)
    staging = PlayedStaging()
    calls = await calls_on(staging, engine)
    item = asyncio.ensure_future(calls.generate(CONTEXT, call_of()))
    await paused.wait()
    item.cancel()
    await asyncio.wait({item})
    assert item.cancelled()
    assert list(engine.cancelled_call_ids) == ["c"]
    assert not staging.calls


async def test_cancelled_item_does_not_undo_a_staging_that_began() -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        begun.set()
        await finish.wait()

    staging = PlayedStaging()
    staging.staging = hold
    calls = await calls_on(staging)
    item = asyncio.ensure_future(calls.generate(CONTEXT, call_of()))
    await begun.wait()
    item.cancel()
    await asyncio.wait({item})
    finish.set()
    await calls.settle()
    assert item.cancelled()
    assert len(staging.calls) == 1


async def test_generation_that_is_late_is_the_items_deadline() -> None:
    async def pause(_call_id: str) -> None:
        await asyncio.Event().wait()

    engine = ScriptedEngine(pause=pause)
    calls = await calls_on(PlayedStaging(), engine)
    context = item_pb2.ItemContext(sequence=1, tenant="t", timeout_ms=30)
    with pytest.raises(Refusal) as caught:
        await calls.generate(context, call_of())
    assert caught.value.reason == er.ERROR_REASON_ITEM_DEADLINE
    assert list(engine.cancelled_call_ids) == ["c"]


@pytest.mark.requirement("CAP-8")
async def test_straddling_generation_is_counted_and_keeps_its_version() -> None:
    engine = ScriptedEngine()

    async def pause(_call_id: str) -> None:
        await engine.update_weights("", 4)

    engine.pause = pause
    staging = PlayedStaging()
    calls = await calls_on(staging, engine)
    generated = await calls.generate(CONTEXT, call_of())
    assert generated.staged.weight_version == 0
    assert generated.completion.weight_version_count == 2
    assert calls.epoch_span_count == 1
    engine.pause = None
    generated = await calls.generate(CONTEXT, call_of(call_id="d"))
    assert generated.staged.weight_version == 4
    assert generated.completion.weight_version_count == 1
    assert calls.epoch_span_count == 1


@pytest.mark.parametrize(
    ("engine", "call", "reason"),
    [
        (
            ScriptedEngine(ScriptedOptions(context_token_count=8)),
            call_of(),
            er.ERROR_REASON_REQUEST_REFUSED,
        ),
        (
            ScriptedEngine(),
            call_of({"role": "user", "content": 5}),
            er.ERROR_REASON_REQUEST_REFUSED,
        ),
    ],
)
async def test_engines_refusal_is_passed_on(
    engine: ScriptedEngine, call: pb.GenerateCall, reason: er.ErrorReason.ValueType
) -> None:
    calls = await calls_on(PlayedStaging(), engine)
    with pytest.raises(Refusal) as caught:
        await calls.generate(CONTEXT, call)
    assert caught.value.reason == reason
    assert caught.value.facts["parameter"]


async def test_absent_engine_is_unavailable() -> None:
    engine = ScriptedEngine()
    calls = await calls_on(PlayedStaging(), engine)
    await engine.stop()
    with pytest.raises(Refusal) as caught:
        await calls.generate(CONTEXT, call_of())
    assert caught.value.reason == er.ERROR_REASON_ENGINE_UNAVAILABLE


async def test_calls_beyond_the_bound_are_shed() -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        begun.set()
        await finish.wait()

    calls = await calls_on(PlayedStaging(), ScriptedEngine(pause=pause), running_max=1)
    first = asyncio.ensure_future(calls.generate(CONTEXT, call_of()))
    await begun.wait()
    with pytest.raises(Refusal) as caught:
        await calls.generate(CONTEXT, call_of(call_id="d"))
    assert caught.value.reason == er.ERROR_REASON_OVERLOADED
    finish.set()
    assert (await first).HasField("staged")


async def test_admission_of_another_call_is_malformed() -> None:
    call = call_of()
    call.admission.call_id = "other"
    calls = await calls_on(PlayedStaging())
    with pytest.raises(Refusal) as caught:
        await calls.generate(CONTEXT, call)
    assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE
