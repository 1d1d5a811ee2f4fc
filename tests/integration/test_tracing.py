"""One trace a call over all its services, links from what comes of it, and no more than that."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.sdk.trace import Tracer

from callforest.capture.v1 import group_batch_pb2
from callforest_client.rollout import Outcome
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.trainer.service import TrainerService
from tests.integration.recorded_telemetry import RecordedTelemetry, Seen
from tests.integration.running_mesh import play
from tests.integration.traced_mesh import PATHS, Traced, traced
from tests.integration.trainer_fakes import World

HARNESS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HARNESS_SPAN = "00f067aa0ba902b7"
SECRET = "zanzibar"
WAIT_S = 60.0


async def ask(
    base_url: str, text: str, traceparent: str = "", path: str = "chat/completions"
) -> dict[str, object]:
    body: dict[str, object] = {"model": "scripted", "seed": 1}
    body["messages" if path.startswith("chat") else "input"] = [{"role": "user", "content": text}]
    headers = {"traceparent": traceparent} if traceparent else {}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/{path}", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, object] = json.loads(await response.text())
        return answer


def by_trace(spans: list[Seen]) -> dict[int, list[Seen]]:
    found: dict[int, list[Seen]] = defaultdict(list)
    for span in spans:
        found[span.trace_id].append(span)
    return found


def check_call(spans: list[Seen], parent_id: int | None = None) -> Seen:
    """Hold one trace against what a captured call must leave; give its root."""
    (root,) = [span for span in spans if span.name == "call"]
    assert root.service == "callforest-gateway"
    assert root.parent_id == parent_id
    named = {span.span_id: span.name for span in spans}
    fetched = [span for span in spans if span.name == "staging/FetchPrefix"]
    parents = {
        (span.service, span.name): named.get(span.parent_id or 0)
        for span in spans
        if span is not root and span not in fetched
    }
    assert parents == PATHS
    assert len(spans) == len(PATHS) + 1 + len(fetched)
    assert not any(span.failed for span in spans)
    named_calls = {
        span.attributes["callforest.call_id"]
        for span in spans
        if span.name not in ("chat", "staging/FetchPrefix")
    }
    assert named_calls == {root.attributes["callforest.call_id"]}, "items of others are mixed in"
    assert root.attributes["callforest.disposition"] == "committed"
    return root


@pytest.mark.requirement("OPS-1")
async def test_each_call_is_one_trace_though_messages_mix_many(tmp_path: Path) -> None:
    async with traced(tmp_path) as mesh:
        rollouts = [await mesh.owner.open(f"r{number}") for number in range(12)]
        await asyncio.gather(*(play(rollout.base_url) for rollout in rollouts))
        stream = mesh.mesh._servers["gateway"]._service._calls._admitting._admission._admissions
        assert stream.item_count == 36
        assert stream.message_count < stream.item_count, "several calls travelled together"
        traces = by_trace(mesh.telemetry.spans())
        assert len(traces) == 36
        roots = [check_call(spans) for spans in traces.values()]
    found = [(one.attributes["callforest.capture_key"], one) for one in roots]
    for rollout in rollouts:
        own = [root for key, root in found if key == rollout.capture_key]
        verdicts = sorted(str(root.attributes["callforest.verdict"]) for root in own)
        assert verdicts == ["continuation", "continuation", "root"]
        call_ids = {root.attributes["callforest.call_id"] for root in own}
        for root in own:
            parent = root.attributes.get("callforest.parent_call_id")
            is_root = root.attributes["callforest.verdict"] == "root"
            assert (parent is None) if is_root else parent in call_ids


@pytest.mark.requirement("OPS-1")
async def test_a_generation_speaks_the_words_of_generative_ai(tmp_path: Path) -> None:
    async with traced(tmp_path) as mesh:
        rollout = await mesh.owner.open("r")
        answer = await ask(rollout.base_url, "begin")
        (chat,) = mesh.telemetry.named("chat")
        (record,) = (await mesh.clients.ledger().manifest("r")).records
    usage = answer["usage"]
    assert isinstance(usage, dict)
    assert chat.kind == "CLIENT"
    said = {key: value for key, value in chat.attributes.items() if key.startswith("gen_ai.")}
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "callforest",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.seed": 1,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.finish_reasons": (record.completion.finish_reason,),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }


@pytest.mark.requirement("OPS-1")
async def test_rows_batches_and_steps_link_to_what_they_come_of(tmp_path: Path) -> None:
    async with traced(tmp_path) as mesh:
        receipts = []
        for slot in range(2):
            rollout = await mesh.owner.open(f"r{slot}")
            outcome = Outcome(1.0 * slot, declared_response_id=await play(rollout.base_url))
            receipts.append(await mesh.owner.finish(rollout, outcome, group_id="g", slot=slot))
        published = await mesh.owner.publish("g", 2)
        again = await mesh.owner.publish("g", 2)
        assert again == published
        calls = {span.attributes["callforest.call_id"]: span for span in roots(mesh.telemetry)}
        rollouts = mesh.telemetry.named("finalize rollout")
        for receipt, span in zip(receipts, rollouts, strict=True):
            assert receipt.traceparent.split("-")[2] == f"{span.span_id:016x}"
            assert span.attributes["callforest.rollout_id"] == receipt.rollout_id
            linked = {attributes["callforest.call_id"]: ids for *ids, attributes in span.links}
            assert linked == {
                call.call_id: [calls[call.call_id].trace_id, calls[call.call_id].span_id]
                for call in receipt.calls
            }
        (batch,) = mesh.telemetry.named("publish group")
        assert [(link[0], link[1]) for link in batch.links] == [
            (span.trace_id, span.span_id) for span in rollouts
        ]
        assert [link[2]["callforest.row_ids"] for link in batch.links] == [
            (row_id,) for row_id in published.row_ids
        ]
        step = await one_step(mesh, tmp_path)
    assert [(link[0], link[1]) for link in step.links] == [(batch.trace_id, batch.span_id)]
    assert step.links[0][2] == {"callforest.group_id": "g", "callforest.cursor": published.cursor}
    assert step.service == "callforest-trainer"
    assert (step.attributes["callforest.step"], step.attributes["callforest.loss"]) == (1, 0.5)


def roots(telemetry: RecordedTelemetry) -> list[Seen]:
    return telemetry.named("call")


async def one_step(mesh: Traced, folder: Path) -> Seen:
    """Train on what is published, with a learner that is told what to do."""
    world = World(folder)
    trainer = TrainerService(
        world.options(),
        Drain(),
        mesh.clients.finalizer(),
        world.workers,
        learner_factory=world.learner,
        telemetry=mesh.telemetry.service("trainer"),
    )
    await trainer.start()
    try:
        async with asyncio.timeout(WAIT_S):
            await anext(trainer._announcements.metrics(0))
        assert mesh.telemetry.measured("trainer", "callforest.trainer.loss") == {(): 0.5}
        assert mesh.telemetry.measured("trainer", "callforest.trainer.weight_version") == {(): 1}
    finally:
        await trainer.stop()
    (step,) = mesh.telemetry.named("optimizer step")
    return step


@pytest.mark.requirement("OPS-1")
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_the_harness_s_own_trace_goes_on(tmp_path: Path, path: str) -> None:
    async with traced(tmp_path, sample_ratio=0.0) as mesh:
        rollout = await mesh.owner.open("r")
        await ask(rollout.base_url, "begin", f"00-{HARNESS_TRACE}-{HARNESS_SPAN}-01", path)
        spans = mesh.telemetry.spans()
        check_call(spans, parent_id=int(HARNESS_SPAN, 16))
    assert {span.trace_id for span in spans} == {int(HARNESS_TRACE, 16)}


@pytest.mark.requirement("OPS-1")
@pytest.mark.parametrize(
    ("sample_ratio", "traceparent"),
    [
        (0.0, ""),
        (0.0, "00-nonsense"),
        (1.0, f"00-{HARNESS_TRACE}-{HARNESS_SPAN}-00"),
    ],
)
async def test_a_call_that_is_not_sampled_makes_no_span(
    tmp_path: Path, sample_ratio: float, traceparent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a span was begun")

    monkeypatch.setattr(Tracer, "start_span", refuse)
    async with traced(tmp_path, sample_ratio) as mesh:
        rollout = await mesh.owner.open("r")
        answer = await ask(rollout.base_url, "begin", traceparent)
        outcome = Outcome(1.0, declared_response_id=str(answer["id"]))
        receipt = await mesh.owner.finish(rollout, outcome, group_id="g", slot=0)
        await mesh.owner.publish("g", 1)
        (record,) = (await mesh.clients.ledger().manifest("r")).records
        assert mesh.telemetry.spans() == []
    assert (record.traceparent, receipt.traceparent, receipt.masked) == ("", "", False)


@pytest.mark.requirement("OPS-1")
async def test_nothing_that_was_said_is_in_a_span(tmp_path: Path) -> None:
    async with traced(tmp_path) as mesh:
        rollout = await mesh.owner.open("r")
        answer = await ask(rollout.base_url, f"do not tell: {SECRET} {SECRET}")
        outcome = Outcome(1.0, declared_response_id=str(answer["id"]))
        await mesh.owner.finish(rollout, outcome, group_id="g", slot=0)
        await mesh.owner.publish("g", 1)
        spans = mesh.telemetry.spans()
    choices = answer["choices"]
    assert isinstance(choices, list)
    reply = choices[0]["message"]["content"]
    assert reply
    values = list(values_of(spans))
    assert len(values) > 40
    for value in values:
        assert isinstance(value, str | bool | int | float), "no list of tokens, no bytes"
        assert SECRET not in str(value)
        assert str(value) != reply


def values_of(spans: list[Seen]) -> Iterator[object]:
    for span in spans:
        yield span.name
        for attributes in (span.attributes, *(link[2] for link in span.links)):
            for value in attributes.values():
                if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
                    yield from value
                else:
                    yield value


def test_a_dropped_group_keeps_its_trace() -> None:
    from callforest.finalizer.v1 import row_log_pb2
    from callforest_mesh.finalizer.groups import dropped, make_batch

    logged = row_log_pb2.LoggedGroup(cursor=1, group_id="g", traceparent="t")
    batch: group_batch_pb2.GroupBatch = make_batch(dropped(logged, "lost"), (), ())
    assert (batch.traceparent, batch.drop_reason) == ("t", "lost")
