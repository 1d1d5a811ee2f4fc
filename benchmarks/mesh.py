"""What capture costs: the whole mesh beside a bare gRPC echo, in one run.

Real gRPC, each service its own process, all interceptors on, tracing at its default sampling. A
scripted engine waits 5 to 35 ms a call (uniform, fixed seed); each rollout begins with a context of
5,000 tokens and every call adds 500 (half observation, half generation). Harnesses speak to the
gRPC edge.

    calls_per_s_N           captured calls a second with N rollouts at once
    added_latency_ms_*      what a call takes beyond the engine's own time, N = 1
    cpu_per_call_...        processor time of all services and of this client for one captured call,
                            in unary calls: client and server time of a bare grpc.aio echo of 8
                            bytes, measured in the same run
    commits_per_record_...  fdatasync calls of Staging and Ledger (strace) for each durable record:
                            an intent, a staged call, a call record
    staged_per_s_N          durable staged records of 4 KiB a second by N writers
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks._echo import echo_figures
from benchmarks._processes import Mesh, running_mesh
from callforest.capture.v1 import completion_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_client.gateway import GatewayClient
from callforest_core.custody.call import CallIdentity
from callforest_core.custody.completion import complete_call

CONTEXT_TOKENS, DELTA_TOKENS = 5000, 500
RECORD_BYTES = 4096
SERVICES = ("staging", "ledger", "admission", "worker", "gateway")


@dataclass
class Load:
    """What a load came to."""

    calls: int = 0
    seconds: float = 0.0
    added_ms: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.calls / self.seconds


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def play(mesh: Mesh, gateway: GatewayClient, calls: int, load: Load) -> None:
    """Run one rollout of `calls` calls."""
    admission = mesh.clients.admission()
    attempt = await admission.open_attempt(f"r-{uuid.uuid4().hex}", request_id=str(uuid.uuid4()))
    # The scripted engine's vocabulary is bytes: one character, one token.
    messages = [{"role": "user", "content": "x" * (CONTEXT_TOKENS - DELTA_TOKENS // 2)}]
    for _ in range(calls):
        body = {"model": "scripted", "messages": messages, "max_tokens": DELTA_TOKENS // 2}
        served = await gateway.complete(attempt.capture_key, json.dumps(body).encode())
        load.calls += 1
        load.added_ms.append(served.overhead_us / 1000)
        answer = json.loads(served.response)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "y" * (DELTA_TOKENS // 2)})


async def run_load(mesh: Mesh, rollouts: int, calls: int) -> Load:
    """Run rollouts at once, each of `calls` calls."""
    gateway = GatewayClient(mesh.clients._channel("gateway"))  # noqa: SLF001 - a benchmark's own
    load = Load()
    began = time.perf_counter()
    await asyncio.gather(*(play(mesh, gateway, calls, load) for _ in range(rollouts)))
    load.seconds = time.perf_counter() - began
    await gateway.close()
    return load


async def stage_records(mesh: Mesh, writers: int, each: int) -> tuple[float, float]:
    """Stage records of 4 KiB; give records a second and bytes staged."""
    staging = mesh.clients.staging()
    rng = np.random.default_rng(3)
    staged_bytes = 0

    async def write(writer: int) -> None:
        nonlocal staged_bytes
        attempt = f"w-{uuid.uuid4().hex}-{writer}"
        for number in range(each):
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
            staged_bytes += message.ByteSize()
            await staging.stage(message)

    began = time.perf_counter()
    await asyncio.gather(*(write(writer) for writer in range(writers)))
    return writers * each / (time.perf_counter() - began), staged_bytes


async def timed(action: Callable[[], Awaitable[Load]], mesh: Mesh) -> tuple[Load, float]:
    """Run a load; give it and the processor seconds of services and client."""
    before = sum(mesh.cpu_s().values()) + own_cpu_s()
    load = await action()
    return load, sum(mesh.cpu_s().values()) + own_cpu_s() - before


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
        load, cpu_s = await timed(lambda: run_load(mesh, 64, calls), mesh)
        result["calls_per_s_64"] = round(load.per_second, 1)
        result["cpu_per_call_us_at_64"] = round(cpu_s / load.calls * 1e6, 1)
        in_unary = cpu_s / load.calls * 1e6 / echo.aio_cpu_us
        result["cpu_per_call_in_unary_calls_at_64"] = round(in_unary, 3)
        async with mesh.counted_commits(["staging", "ledger"]) as commits:
            counted = await run_load(mesh, 64, calls)
        result["commits_per_record_at_64"] = round(sum(commits.values()) / (3 * counted.calls), 4)
        for writers, each in ((1, 200), (8, 200)):
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
