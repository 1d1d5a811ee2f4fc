"""A worker continues a restored call: it is another attempt's, and the staged call says whose."""

import json

import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import coords_of
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.unit.worker.played_staging import CONTEXT, USER, PlayedStaging, behind, call_of

pytestmark = pytest.mark.requirement("ADM-9", "TRN-12")

NEXT = "k-a1"


async def calls_on(staging: PlayedStaging) -> Calls:
    engine = ScriptedEngine()
    await engine.start()
    return Calls(engine, staging, WorkerOptions("unused"))


def restored(call: pb.GenerateCall) -> pb.GenerateCall:
    """The call as one of the attempt that restored its parent."""
    call.capture_key = call.admission.capture_key = NEXT
    call.admission.continuation.parent_capture_key = "k"
    return call


async def begun(calls: Calls) -> tuple[pb.GeneratedCall, list[object]]:
    """Make a call of the first attempt; give it and what a continuation's messages are."""
    first = await calls.generate(CONTEXT, call_of(call_id="a"))
    text = json.loads(first.chat_response)["choices"][0]["message"]["content"]
    return first, [USER, {"role": "assistant", "content": text}, USER]


async def test_the_prefix_is_fetched_under_its_owner() -> None:
    elsewhere, staging = PlayedStaging(), PlayedStaging()
    first, messages = await begun(await calls_on(elsewhere))
    (parent,) = elsewhere.calls
    delta = staging_pb.PrefixDelta(call_id="a", token_ids=parent.canonical.token_ids)
    staging.prefix = staging_pb.Prefix(deltas=[delta])
    here = await calls_on(staging)
    call = restored(call_of(*messages, call_id="b", position=behind(first.staged)))
    generated = await here.generate(CONTEXT, call)
    assert generated.WhichOneof("capture") == "staged", generated.failed
    (query,) = staging.queries
    assert (query.capture_key, query.call_id) == ("k", "a")
    (message,) = staging.calls
    assert (message.capture_key, message.parent_capture_key) == (NEXT, "k")
    assert generated.staged == coords_of(message)
    assert generated.staged.parent_capture_key == "k"
    sibling = restored(call_of(*messages, call_id="c", position=behind(first.staged)))
    assert (await here.generate(CONTEXT, sibling)).HasField("staged")
    assert len(staging.queries) == 1, "the fetched sequence is kept under its owner"


async def test_what_is_kept_of_the_earlier_attempt_is_used() -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging)
    first, messages = await begun(calls)
    call = restored(call_of(*messages, call_id="b", position=behind(first.staged)))
    second = await calls.generate(CONTEXT, call)
    assert second.staged.prev_token_count == first.staged.delta_token_count
    assert not staging.queries


async def test_calls_of_the_same_id_in_two_attempts_are_kept_apart() -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging)
    first, messages = await begun(calls)
    again = restored(call_of(*messages, call_id="a", position=behind(first.staged)))
    second = await calls.generate(CONTEXT, again)
    assert second.staged.chain_hash != first.staged.chain_hash
    once_more = restored(call_of(*messages, call_id="b", position=behind(first.staged)))
    third = await calls.generate(CONTEXT, once_more)
    assert third.staged.prev_token_count == first.staged.delta_token_count
    assert not staging.queries


async def test_a_store_that_drops_the_owner_is_noticed() -> None:
    """A Staging of an older release does not know the field: nothing must be acknowledged."""
    staging = PlayedStaging()
    calls = await calls_on(staging)
    first, messages = await begun(calls)
    call = restored(call_of(*messages, call_id="b", position=behind(first.staged)))

    honest = await calls.generate(CONTEXT, call)
    dropped = type(honest.staged).FromString(honest.staged.SerializeToString())
    dropped.ClearField("parent_capture_key")
    staging.receipt = staging_pb.StagedReceipt(coords=dropped)
    generated = await calls.generate(CONTEXT, call)
    assert generated.failed.reason == "stage_failed"
    assert generated.chat_response, "it is served all the same"


async def test_a_root_that_the_worker_made_of_a_continuation_names_no_owner() -> None:
    staging = PlayedStaging()
    calls = await calls_on(staging)
    first, messages = await begun(calls)
    call = restored(call_of(*messages, call_id="b", position=behind(first.staged)))
    call.admission.is_forest = True
    call.admission.continuation.match = capture_admission_pb2.HISTORY_MATCH_EXACT
    call.chat_request = json.dumps({"messages": [USER]}).encode()
    generated = await calls.generate(CONTEXT, call)
    assert generated.decision.input == capture_admission_pb2.CAPTURE_INPUT_ROOT
    assert generated.staged.parent_capture_key == ""
    assert not generated.staged.HasField("parent_call_id")
