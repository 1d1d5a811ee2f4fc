"""What capture costs: the whole mesh beside a bare gRPC echo, in one run.

Real gRPC, each service its own process, all interceptors on; metrics, and traces at their default
sampling, go by OTLP to a collector whose own time does not count. A scripted engine waits 5 to 35
ms a call (uniform, fixed seed). Every call adds 500 tokens (half observation, half generation), and
a rollout begins with so many that its calls inherit 5,000 in the mean. Harnesses speak to the gRPC
edge; their attempts are opened before the clock starts.

    calls_per_s_N           captured calls a second with N rollouts at once
    added_latency_ms_*      what a call takes beyond the engine's own time, N = 1
    cpu_us_SERVICE_at_64    processor time of a service's process, or of this client (`client`), for
                            one captured call
    cpu_us_engine           processor time of the bare engine for one call: the same engine answers
                            the same conversations, without a prefix to splice, in this process
    cpu_per_call_us_at_64   all of cpu_us_*_at_64 less cpu_us_engine, which runs within the worker
                            and would be spent without any capture. All five services count whole
                            otherwise, and the client with the writing of its requests
    cpu_per_call_in_...     the same in unary calls: client and server time of a bare grpc.aio echo
                            of 8 bytes with 64 in flight, measured in the same run, before and
                            after; the load runs LOADS times so, and the one in the middle counts
    ..._least, ..._most     the least and the most of them
    commits_per_record_...  fdatasync calls of Staging and Ledger (strace) for each durable record:
                            an intent, a staged call, a call record
    staged_per_s_N          durable staged records of 4 KiB a second by N writers, each with a
                            stream of its own and up to 64 records in flight; the records are made
                            before the clock starts
    unary_echo_per_s        the better of sync and aio echo with 64 in flight
    stored_bytes_per_byte   growth of Staging's used pages for each byte staged, 8 writers

    python benchmarks/mesh.py [--calls N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import numpy as np

from benchmarks._collector import start_collector
from benchmarks._echo import echo_figures
from benchmarks._processes import Mesh, running_mesh
from callforest.capture.v1 import completion_pb2, staged_call_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_client.gateway import GatewayClient
from callforest_client.staging import StagingClient
from callforest_core.custody.call import CallIdentity
from callforest_core.custody.completion import complete_call
from callforest_mesh.worker.engine import EngineRequest
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions

CONTEXT_TOKENS, DELTA_TOKENS = 5000, 500
RECORD_BYTES = 4096
LOADS = 5
"""How often the processor time of a load is measured."""
WINDOW = 64
"""Records that a writer has in flight."""
ENGINE = ScriptedOptions(
    latency_s=(0.005, 0.035),
    seed=11,
    context_token_count=1 << 20,
    turn_tokens=(DELTA_TOKENS // 2 - 1, DELTA_TOKENS // 2 - 1),
)
_IN_UNARY = "cpu_per_call_in_unary_calls_at_64"
SERVICES = ("staging", "ledger", "admission", "worker", "gateway")


@dataclass
class Load:
    """What a load came to; `cpu_s` is by service, and of this client as `client`."""

    calls: int = 0
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    added_ms: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.calls / self.seconds


class Conversation:
    """A harness's side of a rollout: requests that grow by what was answered.

    The scripted engine's vocabulary is bytes: one character, one token.

    Args:
        calls: how many calls it will have; they inherit CONTEXT_TOKENS in the mean.
    """

    def __init__(self, calls: int) -> None:
        self._messages: list[str] = []
        self._add("user", "x" * max(1, CONTEXT_TOKENS - (calls - 1) * DELTA_TOKENS // 2))

    @property
    def request(self) -> bytes:
        """The next request."""
        opening = f'{{"model":"scripted","max_tokens":{DELTA_TOKENS // 2},"messages":['
        return f"{opening}{','.join(self._messages)}]}}".encode()

    def answered(self, response: bytes) -> None:
        """Take a response in, and say something to it."""
        self._add("assistant", json.loads(response)["choices"][0]["message"]["content"])
        self._add("user", "y" * (DELTA_TOKENS // 2))

    def _add(self, role: str, content: str) -> None:
        self._messages.append(json.dumps({"role": role, "content": content}))


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_s(mesh: Mesh) -> dict[str, float]:
    return {**mesh.cpu_s(), "client": own_cpu_s()}


async def play(gateway: GatewayClient, capture_key: str, calls: int, load: Load) -> None:
    """Run one rollout of `calls` calls."""
    conversation = Conversation(calls)
    for _ in range(calls):
        served = await gateway.complete(capture_key, conversation.request)
        load.calls += 1
        load.added_ms.append(served.overhead_us / 1000)
        conversation.answered(served.response)


async def bare_engine_cpu_us(rollouts: int, calls: int) -> float:
    """Measure what the engine itself takes for one call of such rollouts."""
    engine = ScriptedEngine(ENGINE)
    await engine.start()

    async def converse(number: int) -> list[EngineRequest]:
        conversation = Conversation(calls)
        requests = []
        for turn in range(calls):
            request = EngineRequest(f"c{number}-{turn}", 0, conversation.request)
            requests.append(request)
            conversation.answered((await engine.generate(request)).response)
        return requests

    async def repeat(requests: list[EngineRequest]) -> None:
        for request in requests:
            await engine.generate(request)

    asked = await asyncio.gather(*map(converse, range(rollouts)))
    before = own_cpu_s()
    await asyncio.gather(*map(repeat, asked))
    return (own_cpu_s() - before) / (rollouts * calls) * 1e6


async def run_load(mesh: Mesh, rollouts: int, calls: int) -> Load:
    """Run rollouts at once, each of `calls` calls."""
    gateway = GatewayClient(mesh.clients._channel("gateway"))  # noqa: SLF001 - a benchmark's own
    admission = mesh.clients.admission()
    opening = [
        admission.open_attempt(f"r-{uuid.uuid4().hex}", request_id=str(uuid.uuid4()))
        for _ in range(rollouts)
    ]
    keys = [attempt.capture_key for attempt in await asyncio.gather(*opening)]
    load = Load()
    before, began = cpu_s(mesh), time.perf_counter()
    await asyncio.gather(*(play(gateway, key, calls, load) for key in keys))
    load.seconds = time.perf_counter() - began
    load.cpu_s = {name: used - before[name] for name, used in cpu_s(mesh).items()}
    await gateway.close()
    return load


def make_records(writer: int, count: int) -> list[staged_call_pb2.StagedCall]:
    """Make records of 4 KiB, all roots of one attempt."""
    rng = np.random.default_rng(writer)
    attempt = f"w-{uuid.uuid4().hex}-{writer}"
    records = []
    for number in range(count):
        call = complete_call(
            CallIdentity(attempt, f"c{number}", None),
            prefix=None,
            parent_chain_hash=None,
            prompt_ids=rng.integers(0, 150_000, 256, dtype=np.uint32),
            generated_ids=rng.integers(0, 150_000, 320, dtype=np.uint32),
            logprobs=-rng.random(320, dtype=np.float32),
            weight_version=1,
        )
        completion = completion_pb2.Completion(
            status=completion_pb2.COMPLETION_STATUS_COMPLETED,
            finish_reason="stop",
            generation_token_count=320,
            weight_version_count=1,
        )
        message = staged_call_to_proto(call, b"{}", completion)
        message.served_response = b" " * max(2, RECORD_BYTES - message.ByteSize() + 2)
        records.append(message)
    return records


async def stage_records(mesh: Mesh, writers: int, each: int) -> tuple[float, float]:
    """Stage records of 4 KiB; give records a second and bytes staged."""
    records = [make_records(writer, each) for writer in range(writers)]
    clients = [StagingClient(mesh.clients._channel("staging")) for _ in records]  # noqa: SLF001

    async def write(client: StagingClient, left: Iterator[staged_call_pb2.StagedCall]) -> None:
        for record in left:
            await client.stage(record)

    began = time.perf_counter()
    shared = [(client, iter(own)) for client, own in zip(clients, records, strict=True)]
    await asyncio.gather(*(write(*one) for one in shared for _ in range(WINDOW)))
    seconds = time.perf_counter() - began
    for client in clients:
        await client.close()
    staged_bytes = sum(record.ByteSize() for own in records for record in own)
    return writers * each / seconds, staged_bytes


async def measure(calls: int, collector: str) -> dict[str, float]:
    worker = {"engine": "scripted", "scripted": asdict(ENGINE)}
    telemetry = {"exporter": "otlp", "endpoint": collector}
    result: dict[str, float] = {}
    async with running_mesh(SERVICES, {"worker": worker, "telemetry": telemetry}) as mesh:
        await run_load(mesh, 16, 2)  # warm
        for rollouts in (1, 16):
            load = await run_load(mesh, rollouts, calls)
            result[f"calls_per_s_{rollouts}"] = round(load.per_second, 1)
            if rollouts == 1:
                cuts = statistics.quantiles(load.added_ms, n=100)
                result["added_latency_ms_p50"] = round(cuts[49], 2)
                result["added_latency_ms_p99"] = round(cuts[98], 2)
        result |= await processor_figures(mesh, calls)
        async with mesh.counted_commits(["staging", "ledger"]) as commits:
            counted = await run_load(mesh, 64, calls)
        result["commits_per_record_at_64"] = round(sum(commits.values()) / (3 * counted.calls), 4)
        result |= await staging_figures(mesh)
    result["staged_8_over_unary_echo"] = round(
        result["staged_per_s_8"] / result["unary_echo_per_s"], 3
    )
    return result


async def processor_figures(mesh: Mesh, calls: int) -> dict[str, float]:
    """Measure what a call takes of the processors with 64 rollouts at once, and an echo."""
    loads = []
    echoes = [await echo_figures()]
    for _ in range(LOADS):
        load = await run_load(mesh, 64, calls)
        bare_us = await bare_engine_cpu_us(64, calls)
        echoes.append(await echo_figures())
        unary_us = (echoes[-2].aio_cpu_us + echoes[-1].aio_cpu_us) / 2
        loads.append(cpu_figures(load, bare_us, unary_us))
    loads.sort(key=lambda one: one[_IN_UNARY])
    least, most = (f"cpu_per_call_in_unary_calls_{word}" for word in ("least", "most"))
    rates = [rate for one in echoes for rate in (one.aio_per_s, one.sync_per_s)]
    return {
        **loads[len(loads) // 2],
        least: loads[0][_IN_UNARY],
        most: loads[-1][_IN_UNARY],
        "unary_echo_per_s": round(max(rates), 1),
    }


def cpu_figures(load: Load, engine_us: float, unary_us: float) -> dict[str, float]:
    """Tell what a call of a load took: by process, together, and in unary calls."""
    by_process = {name: used / load.calls * 1e6 for name, used in load.cpu_s.items()}
    whole_us = sum(by_process.values()) - engine_us
    return {
        "calls_per_s_64": round(load.per_second, 1),
        **{f"cpu_us_{name}_at_64": round(used) for name, used in by_process.items()},
        "cpu_us_engine": round(engine_us),
        "cpu_per_call_us_at_64": round(whole_us, 1),
        "unary_cpu_us": round(unary_us, 1),
        _IN_UNARY: round(whole_us / unary_us, 3),
    }


async def staging_figures(mesh: Mesh) -> dict[str, float]:
    """Measure how fast records are staged, and how much the store grows by them."""
    result = {}
    staging = mesh.clients.staging()
    for writers, each in ((1, 1000), (8, 500)):
        before = (await staging.stat()).store_bytes
        rate, size = await stage_records(mesh, writers, each)
        after = (await staging.stat()).store_bytes
        result[f"staged_per_s_{writers}"] = round(rate, 1)
    return {**result, "stored_bytes_per_byte": round((after - before) / size, 3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=12, help="calls of each rollout")
    calls = parser.parse_args().calls
    with ExitStack() as stack:
        collector = start_collector(stack)
        print("RESULT " + json.dumps(asyncio.run(measure(calls, collector))))


if __name__ == "__main__":
    main()
