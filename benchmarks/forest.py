"""Reconstruct a branchy rollout, beside SHA-256 over what its verification must hash.

A trunk of 100 calls with a branch of 5 calls after every fifth: 200 calls, 20 branches, about
100,000 tokens. Timed: verify every call of the attempt and build all rows with their loss masks,
from staged calls as arrays. The floor is hashlib over exactly the pre-images that FOR-4 requires
(the digest of every call, the chain hash of every call, the cumulative hash at every endpoint),
taken from ready buffers. Both sides run in turns in one process; the least of each is compared.

    python benchmarks/forest.py [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from collections.abc import Callable

import numpy as np

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.tokens import TokenIds
from callforest_core.forest.reconstruction import reconstruct

TRUNK, BRANCH, EVERY, TOKENS = 100, 5, 5, 500


def make_calls() -> list[StagedCall]:
    """Stage the rollout's calls, in the order in which they would be made."""
    rng = np.random.default_rng(7)
    paths: dict[str, TokenIds] = {}
    hashes: dict[str, bytes] = {}
    calls: list[StagedCall] = []

    def make(call_id: str, parent: str | None) -> None:
        prefix = paths[parent] if parent else None
        before = prefix if prefix is not None else np.empty(0, np.uint32)
        carry = rng.integers(0, 150_000, TOKENS // 2, dtype=np.uint32)
        generated = rng.integers(0, 150_000, TOKENS // 2, dtype=np.uint32)
        prompt = np.concatenate((before, carry))
        call = complete_call(
            CallIdentity("rollout", call_id, parent),
            prefix=prefix,
            parent_chain_hash=hashes.get(parent or ""),
            prompt_ids=prompt,
            generated_ids=generated,
            logprobs=-rng.random(len(generated), dtype=np.float32),
            weight_version=1,
        )
        paths[call_id] = np.concatenate((prompt, generated))
        hashes[call_id] = call.chain_hash
        calls.append(call)

    for number in range(TRUNK):
        make(f"t{number}", f"t{number - 1}" if number else None)
        if number % EVERY == EVERY - 1:
            for step in range(BRANCH):
                make(f"b{number}-{step}", f"b{number}-{step - 1}" if step else f"t{number}")
    return calls


def pre_images(calls: list[StagedCall]) -> list[bytes]:
    """Give buffers of exactly the sizes that FOR-4 makes us hash."""
    by_id = {call.identity.call_id: call for call in calls}
    parents = {call.identity.parent_call_id for call in calls}
    buffers = []
    for call in calls:
        parent = call.identity.parent_call_id
        chain = 25 + 1 + (32 if parent else 0) + 8 + 8 * call.delta_len
        head = 24 + 3 + 8 + len(call.identity.capture_key) + 8 + len(call.identity.call_id) + 1
        head += 8 + len(parent) if parent else 0
        columns = 8 + len(call.mode) + 32 + 16 + 8 * call.delta_len + 2 * (16 + 4 * call.delta_len)
        buffers += [bytes(chain), bytes(head + columns + 32 + 33 + 33)]
    for call in calls:
        if call.identity.call_id not in parents:
            length = by_id[call.identity.call_id].cum_len
            buffers.append(bytes(26 + 8 + 8 * length))
    return buffers


def least(action: Callable[[], object], rounds: int) -> Callable[[], float]:
    """Give a timer that keeps the least of its runs."""
    best = [float("inf")]

    def run() -> float:
        for _ in range(rounds):
            began = time.perf_counter()
            action()
            best[0] = min(best[0], time.perf_counter() - began)
        return best[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    calls = make_calls()
    manifest = tuple(CallRecord.of(call, f"response-{n}") for n, call in enumerate(calls))
    receipt = Receipt("rollout", manifest, manifest[-1].call_id, terminal_selection="declared")
    selection = [call.identity.call_id for call in calls]
    buffers = pre_images(calls)

    def ours() -> int:
        forest = reconstruct(receipt, calls, selection)
        return sum(int(row.loss_mask.sum()) for row in forest.rows)

    def floor() -> bytes:
        return b"".join(hashlib.sha256(buffer).digest() for buffer in buffers)

    owned = ours()
    assert owned == sum(call.generation_len for call in calls), "every generated token once"
    gc.disable()
    timers = (least(ours, 3), least(floor, 3))
    for _ in range(rounds):
        seconds, floor_seconds = (timer() for timer in timers)
    rows = reconstruct(receipt, calls, selection).rows
    print(
        "RESULT "
        + json.dumps(
            {
                "reconstruct_over_sha256": round(seconds / floor_seconds, 3),
                "reconstruct_ms": round(seconds * 1e3, 3),
                "sha256_ms": round(floor_seconds * 1e3, 3),
                "calls": len(calls),
                "rows": len(rows),
                "tokens": sum(call.delta_len for call in calls),
                "row_tokens": sum(len(row.line.token_ids) for row in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
