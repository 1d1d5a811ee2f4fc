"""What telemetry costs: CPU of a captured call with it off, as it comes by default, and with all.

Four whole meshes run in this process, each with a scripted engine and real LMDB stores:

* off: nothing is exported.
* metrics: metrics are exported, no call is sampled.
* default: metrics, and one call in a hundred.
* all: metrics, and every call.

Those that export do so by OTLP over gRPC to a collector in another process, whose CPU does not
count. A round plays the same rollouts on each mesh, so that a machine's slow moments hit all alike;
the order is drawn anew each round, and the garbage collector waits between rounds. What is counted
is the CPU time of this process, all threads, over the calls of a round: services, exporters,
stores, and the harness with its HTTP client, the same for all. Differences are medians over the
rounds of what a mesh took more than `off` in the same round, with their quartiles. What the default
costs lies below what such a difference can show, so it is derived from what can be measured: a
hundredth of what the spans of all calls cost, and what the observer of an item takes alone (no
span, a duration and the number in work), for each item of a call.

    python benchmarks/tracing.py [--rounds N] [--rollouts N]

Last line: `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import aiohttp

from benchmarks._collector import start_collector
from callforest.capture.v1 import item_pb2
from callforest.capture.v1.attempt_pb2 import CallIntent
from callforest_client.admission import AdmissionClient
from callforest_mesh.assembly import EmbeddedMesh
from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.instruments import Metrics
from callforest_mesh.chassis.item_observer import ItemObserver
from callforest_mesh.chassis.telemetry import ServiceTelemetry, TelemetryOptions

TURNS: Final = 4
ITEMS_OF_A_CALL: Final = 5
"""AdmitCalls, RecordIntents, Generate, Stage, CommitCalls."""
MODES: Final = {"off": None, "metrics": 0.0, "default": TelemetryOptions().sample_ratio, "all": 1.0}
SERVICES: Final = "[staging, ledger, admission, worker, gateway]"


class Bench:
    """One mesh, and its harness."""

    def __init__(self, mesh: EmbeddedMesh, http: aiohttp.ClientSession) -> None:
        self._mesh = mesh
        self._http = http
        self._admission: AdmissionClient = mesh.clients().admission()
        self._rollouts = 0

    async def play(self, rollouts: int) -> float:
        """Play rollouts side by side; give the CPU seconds a call."""
        first = self._rollouts
        self._rollouts += rollouts
        keys = []
        for number in range(first, self._rollouts):
            request_id = f"00000000-0000-4000-8000-{number:012x}"
            opened = await self._admission.open_attempt(f"r{number}", request_id=request_id)
            keys.append(opened.capture_key)
        gc.collect()
        gc.disable()
        begun = time.process_time()
        await asyncio.gather(*(self._play_one(key) for key in keys))
        taken = time.process_time() - begun
        gc.enable()
        return taken / (rollouts * TURNS)

    async def _play_one(self, capture_key: str) -> None:
        url = f"{self._mesh.gateway_url}/rollouts/{capture_key}/v1/chat/completions"
        messages: list[object] = [{"role": "user", "content": "begin " * 100}]
        for turn in range(TURNS):
            body = {"model": "scripted", "messages": messages, "seed": turn}
            async with self._http.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                message = (await response.json())["choices"][0]["message"]
            messages += [message, {"role": "user", "content": f"go on {turn} " * 100}]


async def observer_us() -> float:
    """Give what the observer of an unsampled item takes, in microseconds."""

    async def handler(_context: item_pb2.ItemContext, payload: CallIntent) -> CallIntent:
        return payload

    telemetry = ServiceTelemetry(metrics=Metrics())
    observer: ItemObserver[CallIntent, CallIntent] = ItemObserver(
        handler, service="ledger", rpc="RecordIntents", telemetry=telemetry, describe=None
    )
    context, payload = item_pb2.ItemContext(timeout_ms=1000), CallIntent()
    least = []
    for answer in (handler, observer):
        rounds = []
        for _ in range(5):
            begun = time.process_time()
            for _ in range(20_000):
                await answer(context, payload)
            rounds.append((time.process_time() - begun) / 20_000 * 1e6)
        least.append(min(rounds))
    return least[1] - least[0]


def settings(folder: Path, endpoint: str, ratio: float | None) -> list[str]:
    chosen = [
        f"state_dir={folder}",
        f"services={SERVICES}",
        "gateway.port=0",
        "worker.engine=scripted",
        *(f"{name}.map_size_bytes=1073741824" for name in ("staging", "ledger")),
        *(f"{name}.quota_bytes=800000000" for name in ("staging", "ledger")),
    ]
    if ratio is None:
        return chosen
    return [
        *chosen,
        "telemetry.exporter=otlp",
        f"telemetry.endpoint={endpoint}",
        f"telemetry.sample_ratio={ratio}",
        "telemetry.metrics_interval_s=5",
    ]


async def measure(
    rounds: int, rollouts: int, folder: Path, endpoint: str
) -> dict[str, list[float]]:
    """Give each mode's CPU microseconds a call, round by round."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=rollouts))
        )
        benches = {}
        for name, ratio in MODES.items():
            configuration = load(environment={}, settings=settings(folder / name, endpoint, ratio))
            mesh = EmbeddedMesh(configuration, listen=False)
            benches[name] = Bench(await stack.enter_async_context(mesh), http)
        for bench in benches.values():
            await bench.play(rollouts)  # warms imports, pools and caches
        taken: dict[str, list[float]] = {name: [] for name in MODES}
        order = random.Random(1)
        for _ in range(rounds):
            for name in order.sample(list(MODES), len(MODES)):
                taken[name].append(await benches[name].play(rollouts) * 1e6)
        return taken


def report(taken: dict[str, list[float]], calls: int, item_us: float) -> dict[str, object]:
    """Print what was measured; give it for machines."""
    off = taken["off"]
    found: dict[str, object] = {"rounds": len(off), "calls_a_round": calls}
    print(f"{'':<10} {'CPU us a call':>14} {'more than off':>14}  quartiles")
    for name, values in taken.items():
        more = [own - base for own, base in zip(values, off, strict=True)]
        low, middle, high = quantiles(more, n=4)
        print(f"{name:<10} {median(values):>14.0f} {middle:>14.1f}  {low:.0f} to {high:.0f}")
        found[f"{name}_cpu_us"] = round(median(values), 1)
        found[f"{name}_more_us"] = [round(one, 1) for one in (low, middle, high)]
    spans = median(own - base for own, base in zip(taken["all"], taken["metrics"], strict=True))
    by_default = spans * TelemetryOptions().sample_ratio
    items = item_us * ITEMS_OF_A_CALL
    percent = 100 * (items + by_default) / median(off)
    print(f"spans of a sampled call: {spans:.0f} us; a hundredth of that: {by_default:.1f} us")
    print(f"observer of an item: {item_us:.2f} us; of a call's items: {items:.1f} us")
    print(f"by default, both: {percent:.2f} % of a call's CPU")
    return {
        **found,
        "spans_of_a_sampled_call_us": round(spans, 1),
        "spans_by_default_us": round(by_default, 2),
        "items_of_a_call_us": round(items, 2),
        "default_percent_of_a_call": round(percent, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rollouts", type=int, default=32, help="of each mesh in a round")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = start_collector(stack)
        taken = asyncio.run(measure(given.rounds, given.rollouts, folder, endpoint))
    found = report(taken, given.rollouts * TURNS, asyncio.run(observer_us()))
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
