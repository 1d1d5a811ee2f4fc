"""The codec loses nothing between the core's values and the messages."""

from dataclasses import replace

import numpy as np
import pytest

from callforest.capture.v1 import commit_coords_pb2, completion_pb2, staged_call_pb2
from callforest_client import codec
from callforest_core.custody.call import CallIdentity, CallRecord, StagedCall
from callforest_core.custody.completion import complete_call

COMPLETION = completion_pb2.Completion(
    status=completion_pb2.COMPLETION_STATUS_COMPLETED,
    finish_reason="stop",
    generation_token_count=2,
    weight_version_count=1,
)


def continuation() -> StagedCall:
    return complete_call(
        CallIdentity("r-a1", "c2", "c1"),
        prefix=np.array([1, 2], dtype=np.uint32),
        parent_chain_hash=b"p" * 32,
        prompt_ids=[1, 2, 3, 2**32 - 1],
        generated_ids=[4, 5],
        logprobs=[-0.5, -np.pi],
        weight_version=2**64 - 1,
    )


def root() -> StagedCall:
    return complete_call(
        CallIdentity("r", "c1", None),
        prefix=None,
        parent_chain_hash=None,
        prompt_ids=[],
        generated_ids=[0],
        logprobs=[0.0],
        weight_version=0,
    )


@pytest.mark.parametrize("call", [root(), continuation()], ids=["root", "continuation"])
def test_staged_call_survives_the_wire(call: StagedCall) -> None:
    message = codec.staged_call_to_proto(call, b"{}", COMPLETION)
    back = codec.staged_call_from_proto(
        staged_call_pb2.StagedCall.FromString(message.SerializeToString())
    )
    assert back.custody == call.custody
    assert back.identity == call.identity
    assert (back.carry_len, back.extras) == (call.carry_len, call.extras)
    assert np.array_equal(back.token_ids, call.token_ids)
    assert back.token_ids.dtype == np.uint32
    assert back.logprobs.tobytes() == call.logprobs.tobytes()
    assert codec.coords_of(message) == codec.coords_of(call)


def test_coordinates_of_a_later_release_are_those_of_the_call() -> None:
    """What only that release knows of them says nothing against them; all else does."""
    call = continuation()
    coords = codec.coords_of(call)
    later = commit_coords_pb2.CommitCoords.FromString(coords.SerializeToString() + b"\xfa\x3f\x00")
    assert later != coords
    assert codec.are_coords_of(coords, call)
    assert codec.are_coords_of(later, call)
    for field in coords.DESCRIPTOR.fields:
        for other in (coords, later):
            changed = commit_coords_pb2.CommitCoords()
            changed.CopyFrom(other)
            changed.ClearField(field.name)
            if changed != other:  # the parent's owner is not set here
                assert not codec.are_coords_of(changed, call), field.name


@pytest.mark.bugcase("B32")
def test_columns_are_little_endian_words() -> None:
    columns = codec.staged_call_to_proto(continuation(), b"", COMPLETION).canonical
    assert columns.token_ids == bytes.fromhex("03000000ffffffff0400000005000000")
    assert columns.logprobs[:4] == bytes.fromhex("000000bf")


@pytest.mark.bugcase("B32")
@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_broken_words_are_refused(field: str) -> None:
    message = codec.staged_call_to_proto(continuation(), b"", COMPLETION)
    setattr(message.canonical, field, getattr(message.canonical, field)[:-1])
    with pytest.raises(codec.ColumnError, match="whole words"):
        codec.staged_call_from_proto(message)


def test_columns_of_different_deltas_are_refused() -> None:
    message = codec.staged_call_to_proto(continuation(), b"", COMPLETION)
    message.canonical.carry_token_count += 1
    with pytest.raises(codec.ColumnError, match="but 4 ids"):
        codec.staged_call_from_proto(message)


@pytest.mark.parametrize("call", [root(), continuation()], ids=["root", "continuation"])
@pytest.mark.parametrize("intent_number", [None, 3])
def test_record_survives_the_wire(call: StagedCall, intent_number: int | None) -> None:
    record = CallRecord.of(
        call,
        "chatcmpl-x",
        admitted_at=1_700_000_000.25,
        output_fingerprint=None,
        continuation_fingerprint=b"f" * 32,
        fingerprint_version=2,
        finish_reason="length",
        status="incomplete",
    )
    record = replace(record, intent_number=intent_number)
    message = codec.call_record_to_proto(
        record, call.identity.capture_key, generation_len=2, context=(3, b"d" * 32)
    )
    assert message.intent_number == (intent_number or 0)
    assert codec.call_record_from_proto(message) == record
    assert message.coords == codec.coords_of(call)
    assert message.fingerprints.context_item_count == 3
