"""What capture costs: the whole mesh beside a bare gRPC echo, in one run.

Real gRPC, each service its own process, all interceptors on, tracing at its default sampling. A
scripted engine waits 5 to 35 ms a call (uniform, fixed seed); each rollout begins with a context of
5,000 tokens and every call adds 500 (half observation, half generation). Harnesses speak to the
gRPC edge; their attempts are opened before the clock starts.

    calls_per_s_N           captured calls a second with N rollouts at once
    added_latency_ms_*      what a call takes beyond the engine's own time, N = 1
    cpu_per_call_...        processor time of all services and of this client for one captured call,
                            in unary calls: client and server time of a bare grpc.aio echo of 8
                            bytes, measured in the same run
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
from dataclasses import dataclass, field

import numpy as np

from benchmarks._echo import echo_figures
from benchmarks._processes import Mesh, running_mesh
from callforest.capture.v1 import completion_pb2, staged_call_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_client.gateway import GatewayClient
from callforest_client.staging import StagingClient
from callforest_core.custody.call import CallIdentity
from callforest_core.custody.completion import complete_call

CONTEXT_TOKENS, DELTA_TOKENS = 5000, 500
RECORD_BYTES = 4096
WINDOW = 64
"""Records that a writer has in flight."""
SERVICES = ("staging", "ledger", "admission", "worker", "gateway")


@dataclass
class Load:
    """What a load came to; `cpu_s` is of all services and of this client."""

    calls: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    added_ms: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.calls / self.seconds


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def mesh_cpu_s(mesh: Mesh) -> float:
    return sum(mesh.cpu_s().values()) + own_cpu_s()


async def play(gateway: GatewayClient, capture_key: str, calls: int, load: Load) -> None:
    """Run one rollout of `calls` calls."""
    # The scripted engine's vocabulary is bytes: one character, one token.
    messages = [{"role": "user", "content": "x" * (CONTEXT_TOKENS - DELTA_TOKENS // 2)}]
    for _ in range(calls):
        body = {"model": "scripted", "messages": messages, "max_tokens": DELTA_TOKENS // 2}
        served = await gateway.complete(capture_key, json.dumps(body).encode())
        load.calls += 1
        load.added_ms.append(served.overhead_us / 1000)
        answer = json.loads(served.response)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "y" * (DELTA_TOKENS // 2)})


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
    before, began = mesh_cpu_s(mesh), time.perf_counter()
    await asyncio.gather(*(play(gateway, key, calls, load) for key in keys))
    load.seconds = time.perf_counter() - began
    load.cpu_s = mesh_cpu_s(mesh) - before
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


async def measure(calls: int) -> dict[str, float]:
    worker = {
        "engine": "scripted",
        "scripted": {
            "latency_s": [0.005, 0.035],
            "seed": 11,
            "context_token_count": 1 << 20,
            "turn_tokens": [DELTA_TOKENS // 2 - 1, DELTA_TOKENS // 2 - 1],
        },
    }
    result: dict[str, float] = {}
    async with running_mesh(SERVICES, {"worker": worker}) as mesh:
        await run_load(mesh, 16, 2)  # warm
        echo = await echo_figures()
        result["unary_echo_per_s"] = round(max(echo.aio_per_s, echo.sync_per_s), 1)
        result["unary_cpu_us"] = round(echo.aio_cpu_us, 1)
        for rollouts in (1, 16):
            load = await run_load(mesh, rollouts, calls)
            result[f"calls_per_s_{rollouts}"] = round(load.per_second, 1)
            if rollouts == 1:
                cuts = statistics.quantiles(load.added_ms, n=100)
                result["added_latency_ms_p50"] = round(cuts[49], 2)
                result["added_latency_ms_p99"] = round(cuts[98], 2)
        load = await run_load(mesh, 64, calls)
        cpu_us = load.cpu_s / load.calls * 1e6
        result["calls_per_s_64"] = round(load.per_second, 1)
        result["cpu_per_call_us_at_64"] = round(cpu_us, 1)
        result["cpu_per_call_in_unary_calls_at_64"] = round(cpu_us / echo.aio_cpu_us, 3)
        async with mesh.counted_commits(["staging", "ledger"]) as commits:
            counted = await run_load(mesh, 64, calls)
        result["commits_per_record_at_64"] = round(sum(commits.values()) / (3 * counted.calls), 4)
        for writers, each in ((1, 1000), (8, 500)):
            before = (await mesh.clients.staging().stat()).store_bytes
            rate, size = await stage_records(mesh, writers, each)
            after = (await mesh.clients.staging().stat()).store_bytes
            result[f"staged_per_s_{writers}"] = round(rate, 1)
        result["stored_bytes_per_byte"] = round((after - before) / size, 3)
        result["staged_8_over_unary_echo"] = round(
            result["staged_per_s_8"] / result["unary_echo_per_s"], 3
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=12, help="calls of each rollout")
    calls = parser.parse_args().calls
    print("RESULT " + json.dumps(asyncio.run(measure(calls))))


if __name__ == "__main__":
    main()
