"""The ports of telemetry: bounded labels, sampling, what is written when it fails."""

import asyncio
import gc
import json
import subprocess
import sys

import pytest

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, item_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.streams import RECORD_INTENTS
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.instruments import OTHER, Description, Metrics
from callforest_mesh.chassis.item_observer import ItemObserver
from callforest_mesh.chassis.telemetry import (
    NO_SPAN,
    REASONS,
    SILENT,
    Link,
    TelemetryOptions,
    open_telemetry,
    outcome_of,
)
from tests.integration.recorded_telemetry import RecordedTelemetry

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SIZE = Description("size", "By", "Sizes.")


def test_a_label_has_only_the_values_that_it_was_given() -> None:
    counter = Metrics().counter(SIZE, {"reason": ("known",), "kind": ("a", "b")})
    for number in range(100):
        counter.add(1, f"unknown {number}", "a")
    counter.add(2, "known", f"{'b' * 99}")
    assert counter.sums() == [
        ({"reason": OTHER, "kind": "a"}, 100),
        ({"reason": "known", "kind": OTHER}, 2),
    ]
    with pytest.raises(ValueError, match="zip"):
        counter.add(1, "known")


def test_an_instrument_is_made_once() -> None:
    metrics = Metrics()
    metrics.counter(SIZE).add(1)
    metrics.counter(SIZE).add(1)
    metrics.gauge(SIZE, lambda: 1.0)
    metrics.gauge(SIZE, lambda: 2.0)
    assert [counter.sums() for counter in metrics.counters] == [[({}, 2)]]
    assert [gauge.read() for gauge in metrics.gauges] == [2.0]


def test_a_histogram_puts_each_value_below_its_bound() -> None:
    histogram = Metrics().histogram(SIZE, bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.record(value)
    ((labels, seen),) = histogram.distributions()
    assert (labels, seen.counts, seen.total) == ({}, [2, 1, 1], 6.0)
    assert (seen.least, seen.most) == (0.5, 3.0)


def test_a_value_that_cannot_be_read_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = RecordedTelemetry()
    metrics = telemetry.service("ledger").metrics

    def fail() -> float:
        raise OSError("gone")

    metrics.gauge(Description("broken", "1", "Fails."), fail)
    metrics.gauge(Description("absent", "1", "Is not there."), lambda: None)
    metrics.gauge(SIZE, lambda: 1.0)
    assert telemetry.measured("ledger", "size") == {(): 1.0}
    assert telemetry.measured("ledger", "broken") == {}
    assert telemetry.measured("ledger", "absent") == {}
    assert "broken cannot be read" in caplog.text
    telemetry.shutdown()


@pytest.mark.requirement("OPS-1")
def test_sampling_follows_the_parent_and_else_the_ratio() -> None:
    never, always = RecordedTelemetry(0.0), RecordedTelemetry(1.0)
    unsampled = f"{SAMPLED[:-2]}00"
    assert never.service("gateway").tracer.entry("call", "") is NO_SPAN
    assert always.service("gateway").tracer.entry("call", unsampled) is NO_SPAN
    assert never.service("gateway").tracer.entry("call", SAMPLED).recording
    assert always.service("gateway").tracer.entry("call", "").recording
    tracer = always.service("ledger").tracer
    for parent in ("", "nonsense", unsampled):
        assert tracer.child("commit", parent) is NO_SPAN, "only an edge begins a trace"
        assert tracer.linked("publish", [Link(parent)]) is NO_SPAN
    assert tracer.linked("publish", []) is NO_SPAN
    never.shutdown()
    always.shutdown()


@pytest.mark.requirement("OPS-1")
def test_the_ratio_is_the_part_that_is_sampled() -> None:
    telemetry = RecordedTelemetry(0.25)
    tracer = telemetry.service("gateway").tracer
    sampled = sum(tracer.entry("call", "").recording for _ in range(4000))
    telemetry.shutdown()
    assert 800 < sampled < 1200, "fourteen standard deviations around 1000"


def test_a_span_says_how_it_failed_but_not_what_was_said() -> None:
    telemetry = RecordedTelemetry()
    tracer = telemetry.service("ledger").tracer
    with pytest.raises(RuntimeError), tracer.child("commit", SAMPLED):
        raise RuntimeError("a secret")
    span = tracer.child("commit", SAMPLED)
    span.end()
    span.describe({"late": True})
    span.fail("late")
    span.end()
    failed, ended = telemetry.spans()
    assert (failed.failed, failed.attributes) == (True, {"error.type": "INTERNAL"})
    assert (ended.failed, ended.attributes) == (False, {})
    telemetry.shutdown()


def test_every_outcome_is_a_label() -> None:
    late = Refusal(er.ERROR_REASON_ITEM_DEADLINE, "late", timeout_ms=1)
    outcomes = [outcome_of(one) for one in (late, asyncio.CancelledError(), ValueError())]
    assert outcomes == ["ITEM_DEADLINE", "CANCELLED", "INTERNAL"]
    assert set(outcomes) <= set(REASONS)


@pytest.mark.requirement("OPS-1")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("traceparent", ["", SAMPLED])
async def test_an_item_that_fails_is_measured_by_its_reason(
    traceparent: str, at_once: bool
) -> None:
    async def refuse_later(
        _context: item_pb2.ItemContext, _intent: attempt_pb2.CallIntent
    ) -> capture_admission_pb2.Verdict:
        raise Refusal(er.ERROR_REASON_CALL_MISMATCH, "other", field="body_digest")

    def refuse_at_once(
        _context: item_pb2.ItemContext, _intent: attempt_pb2.CallIntent
    ) -> asyncio.Future[capture_admission_pb2.Verdict]:
        raise Refusal(er.ERROR_REASON_CALL_MISMATCH, "other", field="body_digest")

    telemetry = RecordedTelemetry()
    observer: ItemObserver[attempt_pb2.CallIntent, capture_admission_pb2.Verdict] = ItemObserver(
        refuse_at_once if at_once else refuse_later,
        service="ledger",
        rpc=RECORD_INTENTS.name,
        telemetry=telemetry.service("ledger"),
        describe=None,
    )
    context = item_pb2.ItemContext(timeout_ms=60_000, traceparent=traceparent)
    observer.begin()
    with pytest.raises(Refusal) as refused:
        await observer(context, attempt_pb2.CallIntent())
    observer.end(0.001, context.timeout_ms, refused.value)
    measured = telemetry.measured("ledger", "callforest.item.duration")
    assert measured == {("RecordIntents", "CALL_MISMATCH"): 1}
    failed = [span.attributes["error.type"] for span in telemetry.spans()]
    assert failed == (["CALL_MISMATCH"] if traceparent else [])
    telemetry.shutdown()


async def test_an_item_that_is_cancelled_before_it_began_leaves_nothing_behind() -> None:
    """No coroutine that nobody awaits: such warnings are errors here."""

    async def answer(
        _context: item_pb2.ItemContext, _intent: attempt_pb2.CallIntent
    ) -> capture_admission_pb2.Verdict:
        return capture_admission_pb2.Verdict()

    telemetry = RecordedTelemetry()
    observer: ItemObserver[attempt_pb2.CallIntent, capture_admission_pb2.Verdict] = ItemObserver(
        answer,
        service="ledger",
        rpc=RECORD_INTENTS.name,
        telemetry=telemetry.service("ledger"),
        describe=None,
    )
    for traceparent in ("", SAMPLED):
        context = item_pb2.ItemContext(timeout_ms=1000, traceparent=traceparent)
        task = asyncio.ensure_future(observer(context, attempt_pb2.CallIntent()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect()
    telemetry.shutdown()


def test_silence_keeps_nothing() -> None:
    telemetry = open_telemetry(TelemetryOptions())
    assert telemetry.service("gateway") is SILENT
    SILENT.metrics.counter(SIZE).add(1)
    SILENT.metrics.histogram(SIZE).record(1)
    SILENT.metrics.gauge(SIZE, lambda: 1.0)
    assert (SILENT.metrics.counters, SILENT.metrics.histograms, SILENT.metrics.gauges) == (
        [],
        [],
        [],
    )
    with SILENT.tracer.entry("call", SAMPLED) as span:
        span.describe({"a": 1})
        assert (span.recording, span.traceparent) == (False, "")
    telemetry.shutdown()


def test_silence_loads_no_part_of_the_sdk() -> None:
    code = (
        "import sys; from callforest_mesh.chassis import telemetry as t; "
        "t.open_telemetry(t.TelemetryOptions()).shutdown(); "
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_console_gets_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = open_telemetry(TelemetryOptions("console"))
    service = telemetry.service("gateway")
    service.metrics.counter(SIZE).add(3)
    service.tracer.entry("call", SAMPLED).end()
    telemetry.shutdown()
    telemetry.shutdown()
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in objects if "name" in one] == ["call"]
    (metrics,) = [one for one in objects if "resource_metrics" in one]
    assert "callforest-gateway" in json.dumps(metrics)


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("telemetry.exporter=carrier-pigeon", "exporter"),
        ("telemetry.sample_ratio=1.5", "sample_ratio"),
        ("telemetry.endpoint=localhost:4317", "http://"),
        ("telemetry.metrics_interval_s=0", "metrics_interval_s"),
    ],
)
def test_options_out_of_range_are_refused(setting: str, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        load(environment={}, settings=[setting])
    assert load(environment={}).telemetry == TelemetryOptions()
