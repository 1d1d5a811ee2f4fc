"""Reading a request, and the record of what was served."""

import hashlib
import json

import pytest
from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
)
from callforest.worker.v1 import worker_service_pb2
from callforest_core.lineage.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    conversation_digest,
)
from callforest_core.lineage.items import Dialect, request_items
from callforest_mesh.chassis.validation import check
from callforest_mesh.gateway import core
from callforest_mesh.gateway.refusals import HttpRefusal

USER = {"role": "user", "content": "go"}
ASSISTANT = {"role": "assistant", "content": "HAVING"}


def body_of(*messages: object, **fields: object) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, **fields}).encode()


def served(**fields: object) -> bytes:
    message = {"role": "assistant", "content": "HAVING"}
    return json.dumps({"id": "chatcmpl-c", "choices": [{"message": message}], **fields}).encode()


def refusal_of(body: bytes) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        core.read_request(body)
    return caught.value


def test_probe_has_the_digest_of_each_prefix_that_the_last_answer_follows() -> None:
    messages = [USER, ASSISTANT, USER, ASSISTANT, ASSISTANT, USER]
    request = core.read_request(body_of(*messages, tools=[{"type": "function"}]))
    items = request_items({"messages": messages, "tools": [{"type": "function"}]}, Dialect.CHAT)
    assert request.evidence.probe.item_count == len(items) == 7
    assert request.evidence.probe.assistant_fingerprint == assistant_fingerprint(items)
    for length in range(8):
        digest = request.evidence.probe.context_digests[32 * length : 32 * length + 32]
        followed = length in {4, 5}
        assert digest == (conversation_digest(items[:length]) if followed else bytes(32))
    assert request.evidence.probe.fingerprint_version == FINGERPRINT_VERSION
    check(request.evidence.probe)


def test_body_is_forwarded_as_received() -> None:
    body = b' {"messages" : [{"role":"user","content":"h\\u00e9"}], "temperature":0.50 }\n'
    request = core.read_request(body)
    assert request.body is body
    received = b"".join(
        (bytes(7), b"\4chat", bytes(8), bytes(7), b"\1\0", body)  # the API, no claim, not whole
    )
    assert request.body_digest == hashlib.sha256(received).digest()


def test_request_without_model_text_has_no_fingerprint() -> None:
    assert core.read_request(body_of(USER)).evidence.probe.assistant_fingerprint == b""


def test_what_cannot_be_read_matches_nothing_and_is_no_root() -> None:
    half = {"role": "assistant", "content": "\ud800"}
    one, other = (core.read_request(body_of(USER, half, USER, seed=seed)) for seed in (1, 2))
    assert one.evidence.scan is None
    assert len(one.evidence.probe.assistant_fingerprint) == 32
    assert one.evidence.probe.assistant_fingerprint != other.evidence.probe.assistant_fingerprint
    check(one.evidence.probe)


def test_context_that_cannot_be_read_ends_the_digests_with_what_matches_nothing() -> None:
    odd = {"role": "user", "content": [{"no": "type"}]}
    behind = core.read_request(body_of(USER, ASSISTANT, odd)).evidence.probe
    assert behind.context_digests == bytes(32) + conversation_digest([USER]) + bytes(64)
    before = core.read_request(body_of(USER, odd, ASSISTANT, USER)).evidence.probe
    assert before.context_digests == bytes(5 * 32)
    for probe in (behind, before):
        check(probe)


def test_replay_summarises_the_request() -> None:
    plain, tooled = core.read_request(body_of(USER)), core.read_request(body_of(USER, tools=[{}]))
    assert plain.evidence.replay is not None
    assert tooled.evidence.replay is not None
    assert (plain.evidence.replay.item_count, tooled.evidence.replay.item_count) == (1, 2)
    assert plain.evidence.replay.render_digest != tooled.evidence.replay.render_digest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "valid JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe{}", "valid JSON"),
        (b'\xef\xbb\xbf{"messages":[]}', "valid JSON"),
        (b'{"messages":[{"role":"user"}],"messages":[{"role":"user"}]}', "twice"),
        (b'{"messages":[{"role":"user","role":"user"}]}', "twice"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', "not a number"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}', "out of range"),
        (b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5000 + b"}", "valid JSON"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"messages":[],"x":' + b"[" * 128 + b"]" * 128 + b"}", "deep"),
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":{}}', "messages"),
        (b'{"messages":[null]}', "messages[0]"),
        (b'{"messages":[{"role":"user"},"hi"]}', "messages[1]"),
    ],
)
def test_malformed_body_is_refused(body: bytes, said: str) -> None:
    refusal = refusal_of(body)
    assert (refusal.status, refusal.code) == (400, "invalid_request_error")
    assert said in refusal.message


def test_a_refusal_is_short_however_long_what_is_refused() -> None:
    long = b"9" * 100_000
    assert len(refusal_of(b'{"messages":[],"n":1' + long + b".5e999}").message) < 200
    body = json.dumps({"input": [{"type": "x" * 100_000}]}).encode()
    with pytest.raises(HttpRefusal) as caught:
        core.read_request(body, Dialect.RESPONSES)
    assert len(caught.value.message) < 200


def test_depth_up_to_the_limit_is_read() -> None:
    nested = b'{"messages":[{"role":"user","content":"a"}],"x":' + b"[" * 127 + b"]" * 127 + b"}"
    assert core.read_request(nested).body == nested


def test_too_many_items_are_refused() -> None:
    most = [USER] * core.ITEMS_MAX
    assert core.read_request(body_of(*most)).evidence.probe.item_count == core.ITEMS_MAX
    assert refusal_of(body_of(*most, USER)).parameter == "messages"


@pytest.mark.requirement("CAP-4")
def test_admission_follows_the_verdict() -> None:
    root = capture_admission_pb2.Verdict(root=capture_admission_pb2.Root())
    admission = core.admission_of(root, "k", "c")
    assert admission is not None
    assert admission.WhichOneof("position") == "root"
    place = capture_admission_pb2.Continuation(
        parent_call_id="p", prev_token_count=7, parent_chain_hash=bytes(32)
    )
    admission = core.admission_of(capture_admission_pb2.Verdict(continuation=place), "k", "c")
    assert admission is not None
    assert (admission.capture_key, admission.call_id) == ("k", "c")
    assert admission.continuation == place
    uncaptured = capture_admission_pb2.Uncaptured(reason="unresolved_parent")
    assert core.admission_of(capture_admission_pb2.Verdict(uncaptured=uncaptured), "k", "c") is None


def test_record_is_of_what_was_served() -> None:
    request = core.read_request(body_of(USER))
    record = core.record_of(
        generated(),
        request,
        core.read_response(served(), request),
        timestamp_pb2.Timestamp(seconds=9),
    )
    check(record)
    assert record.response_id == "chatcmpl-c"
    assert record.fingerprints.output == assistant_fingerprint([ASSISTANT])
    assert record.fingerprints.continuation == assistant_fingerprint([USER, ASSISTANT])
    assert record.fingerprints.context_item_count == 1
    assert record.fingerprints.context_digest == conversation_digest([USER])
    assert record.replay == request.evidence.replay
    follow_up = core.read_request(body_of(USER, ASSISTANT, USER))
    assert follow_up.evidence.probe.assistant_fingerprint == record.fingerprints.continuation


@pytest.mark.parametrize(
    ("messages", "response"),
    [
        ([USER, {"role": "assistant", "content": "\ud800"}, USER], served()),
        ([{"role": "user", "content": [{"no": "type"}]}], served()),
        ([USER], served(choices=[{"message": {"content": "\ud800"}}])),
        ([USER], served(choices="none")),
    ],
)
def test_record_that_cannot_be_fingerprinted_is_no_predecessor(
    messages: list[object], response: bytes
) -> None:
    request = core.read_request(body_of(*messages))
    record = core.record_of(
        generated(),
        request,
        core.read_response(response, request),
        timestamp_pb2.Timestamp(seconds=9),
    )
    check(record)
    assert not record.HasField("fingerprints")


@pytest.mark.requirement("CAP-6")
@pytest.mark.parametrize(
    "response",
    [
        served(prompt_token_ids=[1]),
        served(choices=[{"token_ids": [1], "message": {}}]),
        served(choices=[{"message": {"generation_log_probs": [-0.5]}}]),
        b"no JSON",
        b"[]",
    ],
)
def test_response_with_token_material_is_not_served(response: bytes) -> None:
    with pytest.raises(core.ServedResponseError):
        core.read_response(response, core.read_request(body_of(USER)))


def test_response_without_id_is_served_but_has_none() -> None:
    request = core.read_request(body_of(USER))
    assert core.read_response(served(id=None), request).response_id == ""


def generated() -> worker_service_pb2.GeneratedCall:
    completed = completion_pb2.COMPLETION_STATUS_COMPLETED
    return worker_service_pb2.GeneratedCall(
        staged=coordinates(), completion=completion_pb2.Completion(status=completed)
    )


def coordinates() -> commit_coords_pb2.CommitCoords:
    digests = {
        name: bytes(32) for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
    }
    return commit_coords_pb2.CommitCoords(
        capture_key="k", call_id="c", delta_token_count=7, **digests
    )
