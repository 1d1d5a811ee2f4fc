"""Forest mode at the gateway: histories, deltas and measures, by HTTP and gRPC, services real."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_client.channel import connect
from callforest_client.errors import RefusedError
from callforest_client.gateway import CHAT, RESPONSES, GatewayClient
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from tests.integration.first_path_mesh import (
    GO,
    FirstPathMesh,
    events_of,
    running_mesh,
    scripted,
    spoken,
    turn,
)
from tests.integration.running_mesh import running

SYSTEM = {"role": "system", "content": "be brief"}


@pytest.fixture(params=[True, False], ids=["embedded", "sockets"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh of forest mode whose engine answers pseudo-randomly, in ChatML."""
    async with running_mesh(
        tmp_path, ScriptedEngine(), local=request.param, forest=True
    ) as running_one:
        yield running_one


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """The same within this process."""
    async with running_mesh(tmp_path, ScriptedEngine(), local=True, forest=True) as running_one:
        yield running_one


def body(*turns: object, api: pb.CompletionApi.ValueType = CHAT, **fields: object) -> bytes:
    name = "messages" if api == CHAT else "input"
    return json.dumps({"model": "scripted", name: turns, **fields}).encode()


def context_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-callforest-context"]


def parents(records: list[call_record_pb2.CallRecord]) -> list[str]:
    return [record.coords.parent_call_id for record in records]


async def measured_by_http(mesh: FirstPathMesh, key: str, request: bytes) -> httpx.Response:
    return await mesh.http.post(f"{mesh.url}/context/{key}/measure", content=request)


async def refused(mesh: FirstPathMesh, key: str, request: bytes, **given: object) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await mesh.gateway.complete(key, request, **given)
    return caught.value


@pytest.mark.requirement("ADM-2", "ADM-7")
async def test_whole_histories_continue_and_records_are_of_constant_size(
    mesh: FirstPathMesh,
) -> None:
    key = await mesh.open()
    history: list[object] = [SYSTEM, GO]
    contexts = []
    for number in range(6):
        response = await mesh.ask(key, *history)
        contexts.append(context_of(response))
        history += [spoken(response), {"role": "user", "content": f"more {number}"}]
    manifest = await mesh.manifest(key)
    records = manifest.records
    assert contexts == ["root", *["continuation"] * 5]
    assert not manifest.failures
    assert parents(records) == ["", *(one.coords.call_id for one in records[:-1])]
    for record in records:
        assert record.replay.normalization_version == record.output.normalization_version == 3
        assert len(record.replay.tool_content_digest) == 32
        assert record.output.atom_count == 1
        assert not record.HasField("fingerprints")
    assert [one.replay.item_count for one in records] == [3, 5, 7, 9, 11, 13]
    assert [one.decision.input for one in records] == [
        capture_admission_pb2.CAPTURE_INPUT_ROOT,
        *[capture_admission_pb2.CAPTURE_INPUT_SPLICED] * 5,
    ]
    sizes = [one.ByteSize() for one in records[1:]]
    assert max(sizes) - min(sizes) <= 12, "times and counts are variable-length integers"


@pytest.mark.requirement("API-8", "ADM-7")
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_deltas_give_the_rows_of_whole_requests(
    mesh: FirstPathMesh, api: pb.CompletionApi.ValueType
) -> None:
    """Same prompts, tokens, digests and parents, however the history came."""
    fields = {"instructions": "be brief"} if api == RESPONSES else {}
    keys = {"delta": await mesh.open("delta"), "whole": await mesh.open("whole")}
    turns: list[object] = [GO]
    last: str | None = None
    for number in range(4):
        whole = await mesh.gateway.complete(keys["whole"], body(*turns, api=api, **fields), api)
        sent = turns if last is None else turns[-1:]
        delta = await mesh.gateway.complete(
            keys["delta"], body(*sent, api=api, **fields), api, continues_call_id=last
        )
        assert whole.context == delta.context
        assert delta.context.is_continuation == (number > 0)
        last = delta.call_id
        served = json.loads(whole.response)
        echoed = served["output"] if api == RESPONSES else [served["choices"][0]["message"]]
        turns += [*echoed, {"role": "user", "content": f"more {number}"}]
    prompts = mesh.prompts()
    assert prompts[::2] == prompts[1::2]
    manifests = {name: await mesh.manifest(key) for name, key in keys.items()}
    for one, other in zip(manifests["delta"].records, manifests["whole"].records, strict=True):
        assert one.replay == other.replay
        assert one.output == other.output
        assert one.coords.chain_hash == other.coords.chain_hash
        assert one.coords.cumulative_hash == other.coords.cumulative_hash
    calls = [one.coords.call_id for one in manifests["delta"].records]
    assert parents(manifests["delta"].records) == ["", *calls[:-1]]


@pytest.mark.requirement("API-8")
async def test_a_claim_that_does_not_hold_is_refused_and_harms_nothing(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    first = await mesh.gateway.complete(key, body(GO))
    await mesh.gateway.complete(key, body(GO), continues_call_id=first.call_id)
    cases = {
        "another option": body(GO, reasoning_effort="low"),
        "no observation": body(SYSTEM, GO),
        "an answer of its own": body({"role": "assistant", "content": "x"}, GO),
    }
    before = (await mesh.manifest(key)).attempt
    for name, request in cases.items():
        error = await refused(mesh, key, request, continues_call_id=first.call_id)
        assert error.reason == er.ERROR_REASON_HISTORY_CLAIM_REFUSED, name
        assert error.metadata["capture_key"] == key
    error = await refused(mesh, key, body(GO), continues_call_id="nobody")
    assert error.reason == er.ERROR_REASON_HISTORY_REQUIRED
    assert error.metadata == {"capture_key": key, "call_id": "nobody"}
    assert (await mesh.manifest(key)).attempt == before
    assert len(mesh.prompts()) == 2
    served = await mesh.gateway.complete(key, body(GO), continues_call_id=first.call_id)
    assert served.context.is_continuation


@pytest.mark.requirement("API-8")
async def test_a_delta_client_goes_on_with_its_whole_history(tmp_path: Path) -> None:
    """What the gateway no longer has costs one whole request, not the context."""
    cache = {"history_cache_calls": 1}
    async with running_mesh(
        tmp_path, ScriptedEngine(), local=True, forest=True, gateway=cache
    ) as mesh:
        key, other = await mesh.open(), await mesh.open("other")
        first = await mesh.gateway.complete(key, body(GO))
        await mesh.gateway.complete(other, body(GO))
        error = await refused(mesh, key, body(GO), continues_call_id=first.call_id)
        assert error.reason == er.ERROR_REASON_HISTORY_REQUIRED
        assert "history_is_whole" in error.message
        said = json.loads(first.response)["choices"][0]["message"]
        served = await mesh.gateway.complete(
            key, body(GO, said, GO), continues_call_id=first.call_id, history_is_whole=True
        )
        assert served.context.is_continuation
        again = await mesh.gateway.complete(key, body(GO), continues_call_id=served.call_id)
        assert again.context.is_continuation
        records = (await mesh.manifest(key)).records
    assert parents(records) == ["", first.call_id, served.call_id]


async def test_chain_mode_has_no_deltas_and_says_so(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), local=True) as mesh:
        key = await mesh.open()
        first = await mesh.gateway.complete(key, body(GO))
        error = await refused(mesh, key, body(GO), continues_call_id=first.call_id)
        assert error.reason == er.ERROR_REASON_REQUEST_REFUSED
        assert error.metadata == {"parameter": "continues_call_id"}
        assert not first.HasField("context")
        said = json.loads(first.response)["choices"][0]["message"]
        response = await mesh.ask(key, GO, said, GO)
        assert "x-callforest-context" not in response.headers
        (root, follow_up) = (await mesh.manifest(key)).records
        assert follow_up.coords.parent_call_id == root.coords.call_id
        assert follow_up.HasField("fingerprints")
        assert not follow_up.HasField("output")


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize("forest", [True, False])
async def test_an_attempt_of_the_other_mode_is_refused(tmp_path: Path, forest: bool) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), local=True, forest=forest) as mesh:
        mesh.forest = not forest
        key = await mesh.open()
        response = await mesh.ask(key, GO)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "mode_mismatch")
        error = await refused(mesh, key, body(GO))
        assert error.reason == er.ERROR_REASON_MODE_MISMATCH
        assert error.metadata["capture_key"] == key
        assert (await mesh.manifest(key)).attempt.revision == 1
    assert not mesh.prompts()


@pytest.mark.requirement("CAP-7", "CAP-11")
async def test_what_the_engine_refuses_does_not_poison(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedOptions(context_token_count=64))
    async with running_mesh(tmp_path, engine, local=True, forest=True) as mesh:
        key = await mesh.open()
        long = {"role": "user", "content": "long " * 40}
        response = await mesh.ask(key, long)
        assert response.status_code == 400
        response = await mesh.ask(key, GO)
        assert response.status_code == 200
        manifest = await mesh.manifest(key)
    assert not manifest.failures
    assert not manifest.attempt.pending_call_ids
    assert len(manifest.records) == 1


@pytest.mark.requirement("CAP-11")
async def test_another_configuration_needs_another_attempt(tmp_path: Path) -> None:
    """Found by the worker before it generates; then by the ledger; a new attempt is bound anew."""
    engine = scripted(*[turn(5, 4)] * 4)
    async with running_mesh(tmp_path, engine, local=True, forest=True) as mesh:
        key = await mesh.open()
        said = spoken(await mesh.ask(key, GO))
        other = scripted(turn(5, 4), after_turn="\n")
        engine.template = other.template
        for _ in range(2):
            response = await mesh.ask(key, GO, said, GO)
            code = response.json()["error"]["code"]
            assert (response.status_code, code) == (422, "configuration_changed")
            assert "Open another attempt" in response.json()["error"]["message"]
        assert len(mesh.prompts()) == 1
        error = await refused(mesh, key, body(GO, said, GO))
        assert error.reason == er.ERROR_REASON_CONFIGURATION_CHANGED
        manifest = await mesh.manifest(key)
        assert not manifest.failures
        assert not manifest.attempt.pending_call_ids
        again = await mesh.open()
        assert (await mesh.ask(again, GO)).status_code == 200


@pytest.mark.requirement("ADM-3", "OPS-4")
async def test_a_harness_learns_why_its_call_is_a_root(local: FirstPathMesh) -> None:
    mesh = local
    key = await mesh.open()
    first = await mesh.ask(key, SYSTEM, GO)
    assert context_of(first) == "root"
    said = spoken(first)
    changed = {**said, "content": f"{said['content']} !"}
    asked: dict[str, tuple[list[object], dict[str, object]]] = {
        "root; reason=history_not_recorded; difference=rewritten_history": (
            [SYSTEM, GO, changed, GO],
            {},
        ),
        "root; reason=history_not_recorded; difference=system_text": (
            [{**SYSTEM, "content": "be long"}, GO, said, GO],
            {},
        ),
        "root; reason=render_options_changed; difference=template": (
            [SYSTEM, GO, said, GO],
            {"reasoning_effort": "low"},
        ),
        "root; reason=not_observations": ([SYSTEM, GO, said, GO, SYSTEM, GO], {}),
        "continuation": ([SYSTEM, GO, said, GO], {}),
    }
    seen = {}
    for expected, (messages, fields) in asked.items():
        measured = await measured_by_http(mesh, key, body(*messages, **fields))
        assert measured.headers["x-callforest-context"] == expected
        response = await mesh.ask(key, *messages, **fields)
        assert context_of(response) == expected
        seen[response.headers["x-callforest-call-id"]] = expected
    manifest = await mesh.manifest(key)
    assert not manifest.failures
    for record in manifest.records[1:]:
        expected = seen[record.coords.call_id]
        assert record.HasField("difference") == ("difference" in expected)
        assert bool(record.coords.parent_call_id) == (expected == "continuation")
        if "render" in expected:
            assert record.difference.detail == "reasoning_effort"
            assert record.difference.against_call_id == first.headers["x-callforest-call-id"]
    roots = [prompt for prompt in mesh.prompts() if prompt[:1] == mesh.prompts()[0][:1]]
    assert len(roots) == len(mesh.prompts())


@pytest.mark.requirement("ADM-3")
@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
async def test_what_a_chat_message_says_counts_whatever_type_it_claims(
    local: FirstPathMesh, role: str
) -> None:
    """The engine renders a Chat message by its role; no item of Responses hides its content."""
    key = await local.open()
    typed = {"role": role, "type": "function_call", "name": "n", "content": "buy"}
    first = await local.ask(key, typed, GO)
    history = [{**typed, "content": "sell"}, GO, spoken(first), GO]
    assert context_of(await local.ask(key, *history)) == "root; reason=unreadable_item"
    rendered = local.engine.template.render(history, add_generation_prompt=True)
    assert local.prompts()[-1] == rendered.tolist()


async def test_buffered_events_carry_the_context_too(local: FirstPathMesh) -> None:
    key = await local.open()
    first = await local.respond(key, [GO], stream=True)
    assert context_of(first) == "root"
    output = events_of(first)[-1]["response"]["output"]
    second = await local.respond(key, [GO, *output, GO], stream=True)
    assert context_of(second) == "continuation"


@pytest.mark.requirement("ADM-2")
async def test_an_older_accepted_call_is_continued_after_a_rejected_one(
    local: FirstPathMesh,
) -> None:
    key = await local.open()
    accepted = await local.ask(key, GO)
    observed = {"role": "user", "content": "observed"}
    history = [GO, spoken(accepted), observed]
    rejected = await local.ask(key, *history, seed=1)
    retried = await local.ask(key, *history, seed=2)
    last = await local.ask(key, *history, spoken(retried), GO)
    calls = [one.headers["x-callforest-call-id"] for one in (accepted, rejected, retried, last)]
    records = (await local.manifest(key)).records
    assert [one.coords.call_id for one in records] == calls
    assert parents(records) == ["", calls[0], calls[0], calls[2]]


@pytest.mark.requirement("API-8", "CAP-10", "ADM-2")
@pytest.mark.parametrize("kind", ["embedded", "processes"])
async def test_the_configured_mesh_takes_deltas_and_measures(kind: str, tmp_path: Path) -> None:
    forest = "token_capture.forest_training=true"
    async with running(kind, tmp_path, forest) as mesh:
        rollout = await mesh.owner.open("r1", mode=attempt_pb2.CAPTURE_MODE_FOREST)
        key = rollout.capture_key
        async with connect(mesh.configuration.addresses.gateway) as channel:
            gateway = GatewayClient(channel)
            last = await gateway.complete(key, body(GO))
            for number in range(3):
                observed = body({"role": "user", "content": f"more {number}"})
                given = {"continues_call_id": last.call_id}
                measured = await gateway.measure(key, observed, **given)
                last = await gateway.complete(key, observed, **given)
                used = json.loads(last.response)["usage"]["prompt_tokens"]
                assert measured.prompt_token_count == used
                assert measured.context == last.context
                assert last.context.is_continuation
            await gateway.close()
        records = (await mesh.clients.ledger().manifest(key)).records
    assert parents(records) == ["", *(one.coords.call_id for one in records[:-1])]
