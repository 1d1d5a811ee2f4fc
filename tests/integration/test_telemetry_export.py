"""What leaves the processes: metrics with bounded labels, and OTLP to a collector or to none."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from callforest_client.rollout import Outcome
from tests.integration.running_mesh import play, roll_out, running
from tests.integration.traced_mesh import PATHS, traced


@pytest.mark.requirement("OPS-1")
async def test_metrics_count_calls_under_bounded_labels(tmp_path: Path) -> None:
    async with traced(tmp_path, sample_ratio=0.0) as mesh:
        for number in range(2):
            rollout = await mesh.owner.open(f"r{number}")
            last = await play(rollout.base_url)
            outcome = Outcome(1.0, declared_response_id=last if number else "nobody-s")
            await mesh.owner.finish(rollout, outcome, group_id="g", slot=number)
        await mesh.owner.publish("g", 2)
        async with aiohttp.ClientSession() as http:
            base_url = f"{mesh.gateway_url}/rollouts/nobody/v1"
            async with http.post(f"{base_url}/chat/completions", json={"messages": []}) as refused:
                assert refused.status == 400
            async with http.get(f"{mesh.gateway_url}/{'x' * 50}") as unknown:
                assert unknown.status == 404
        measured = mesh.telemetry.measured
        assert measured("admission", "callforest.admission.calls") == {
            ("root",): 2,
            ("continuation",): 4,
        }
        assert measured("gateway", "callforest.gateway.calls") == {("OK",): 6}
        route = "/rollouts/{capture_key}/v1/chat/completions"
        assert measured("gateway", "http.server.request.duration") == {
            (route, "200"): 6,
            (route, "400"): 1,
            ("other", "404"): 1,
        }
        assert measured("staging", "callforest.item.duration")["Stage", "OK"] == 6
        assert measured("staging", "callforest.items.running")["Stage",] == 0
        assert measured("ledger", "callforest.item.duration") == {
            ("RecordIntents", "OK"): 6,
            ("CommitCalls", "OK"): 6,
        }
        assert measured("staging", "callforest.staging.bytes")[()] > 0
        assert measured("ledger", "callforest.store.commits")[()] >= 12
        assert measured("ledger", "callforest.store.queue_depth") == {(): 0}
        edge = {"calls_in_work", "measured_calls", "waiters_of_a_call", "unanswered_items"}
        server = {"concurrent_calls", "concurrent_waits"}
        limits = measured("gateway", "callforest.limit")
        assert {name for (name,) in limits} == edge | server
        assert all(value >= 1 for value in limits.values())
        stored = {"store_queue", "store_readers", "store_read_s", "store_snapshot_s"}
        assert {name for (name,) in measured("finalizer", "callforest.limit")} == stored | server
        assert measured("finalizer", "callforest.finalizer.rollouts") == {
            ("terminal_not_attributed",): 1,
            ("none",): 1,
        }
        rows = measured("finalizer", "callforest.finalizer.rows")
        assert rows == {("training",): 1, ("placeholder",): 1}
        assert measured("worker", "callforest.worker.weight_version") == {(): 0}
        tokens = measured("worker", "callforest.worker.tokens")
        assert tokens["input",] > tokens["output",] > 0


@dataclass
class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """An OTLP collector: (service, span, trace id) of each span, and the names of metrics."""

    spans: list[tuple[str, str, bytes]] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)

    async def Export(self, request: object, _context: object) -> object:  # noqa: N802 - gRPC's
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for resource in request.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                self.spans += [
                    (names["service.name"], span.name, span.trace_id)
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            return trace_service_pb2.ExportTraceServiceResponse()
        assert isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.update(metric.name for metric in scope.metrics)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.mark.requirement("OPS-1")
async def test_processes_export_over_otlp_to_one_collector(tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    chosen = [
        "telemetry.exporter=otlp",
        f"telemetry.endpoint=http://127.0.0.1:{port}",
        "telemetry.sample_ratio=1",
    ]
    async with running("processes", tmp_path, *chosen) as mesh:
        receipt = await roll_out(mesh, "r")
        assert not receipt.masked, receipt
    await server.stop(None)
    traces: dict[bytes, set[tuple[str, str]]] = defaultdict(set)
    for service, name, trace_id in collector.spans:
        traces[trace_id].add((service, name))
    calls = [found for found in traces.values() if ("callforest-gateway", "call") in found]
    assert len(calls) == 3
    for found in calls:
        assert set(PATHS) <= found, "the end of each process exports what is left"
    assert ("callforest-finalizer", "finalize rollout") in set().union(*traces.values())
    assert {"callforest.admission.calls", "callforest.store.commits"} <= collector.metrics


@pytest.mark.requirement("OPS-1")
async def test_a_collector_that_is_away_costs_no_call(tmp_path: Path) -> None:
    away = "telemetry.endpoint=http://127.0.0.1:1"
    chosen = ["telemetry.exporter=otlp", away, "telemetry.sample_ratio=1"]
    async with running("embedded", tmp_path, *chosen, "telemetry.flush_timeout_s=1") as mesh:
        receipt = await roll_out(mesh, "r")
    assert not receipt.masked
    assert receipt.traceparent
