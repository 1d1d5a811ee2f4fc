"""Time custody beside nemo-gym 0.7.0: complete a chain of calls, and verify and linearize it.

Both sides do the same chain in this process, each on its own objects: ours on numpy columns, the
peer on lists and pydantic models. What is timed, as a sum over the chain:

* complete, ours: `CallIdentity(...)` and `complete_path(...)`, the path carried from call to call,
  as a worker keeps it. Cold: `complete_call(...)` with the prefix as plain ids, as after a fetch.
* complete, peer: `RolloutTokenCapture.begin_call(...)` and `.complete_call(...)` with a sink that
  accepts everything at once. Its admissions are made before, and are not counted.
* verify, both: `verify_and_linearize(receipt, calls)` on objects that exist.
* fetch and verify: the same, from stored calls. Ours: the bytes of `StagedCall` messages through
  `callforest_client.codec`. Peer: the JSON of `StagedCallBaseSnapshot` through its own
  `model_validate_json`. The peer's `StagingSource.fetch` must return such snapshots, so whoever
  verifies what another process staged pays for making them.
* floor: `hashlib.sha256` over exactly the pre-images of the digests; a check proves that they are.
  `KEY_floor_speedup_min` is what nothing but these hashes would reach beside the peer: the most
  that any implementation can on this processor, with this Python under the peer.

Rounds interleave the sides, because machines are shared. A speedup divides the least time of one
side by the least of the other; medians are beside it. The garbage collector is off for both, and
the allocator keeps freed memory for both, as in a process that has handled larger messages.
The peer's wheel is downloaded once, without dependencies; when its own needs (pydantic, orjson)
are not met, only our side is timed.

    python benchmarks/custody.py [--rounds N]

Last line: `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import itertools
import json
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from callforest.capture.v1 import completion_pb2, staged_call_pb2
from callforest_client.codec import staged_call_from_proto, staged_call_to_proto
from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call, complete_path
from callforest_core.custody.path import TokenPath
from callforest_core.custody.verification import verify_and_linearize

STATE = Path(__file__).resolve().parent.parent / ".state"
PEER = "nemo-gym==0.7.0"
PEER_PYTHON = "3.13.14"
CHAINS = ((20, 11_000), (50, 22_000), (100, 34_000))
Works: TypeAlias = dict[str, Callable[[], float]]
Times: TypeAlias = dict[str, list[float]]
OURS_PER_ROUND = 5
"""Repetitions of ours in a round; the peer, far slower, has one."""
SHARED_FIELDS = (
    *("model_call_id", "parent_call_id", "prev_len", "delta_len", "cum_len", "weight_version"),
    *("digest", "extras_digest", "mode", "staging_key", "chain_hash", "cumulative_hash"),
)


@dataclass(frozen=True)
class Turn:
    """What the engine saw and said in one call."""

    prompt: np.ndarray
    generated: np.ndarray
    logprobs: np.ndarray
    prev_len: int


@dataclass(frozen=True)
class Floor:
    """The pre-images that a chain's digests cover."""

    complete: list[bytes]
    verify: list[bytes]


def turns_of(calls: int, tokens: int) -> list[Turn]:
    """A chain of equal deltas: two thirds observation, one third sampled."""
    random = np.random.default_rng(calls)
    path = random.integers(0, 151_000, tokens, dtype=np.uint32)
    turns = []
    ends = np.linspace(0, tokens, calls + 1).astype(int)
    for start, end in itertools.pairwise(ends):
        boundary = int(start + (end - start) * 2 // 3)
        logprobs = -random.exponential(1.0, end - boundary).astype(np.float32)
        turns.append(Turn(path[:boundary].copy(), path[boundary:end].copy(), logprobs, int(start)))
    return turns


def complete_ours(turns: list[Turn]) -> list[StagedCall]:
    """Complete the chain as a worker does that keeps each call's path."""
    calls: list[StagedCall] = []
    parent: StagedCall | None = None
    path: TokenPath | None = None
    for index, turn in enumerate(turns):
        parent, path = complete_path(
            CallIdentity("rollout-1", f"call-{index}", parent.identity.call_id if parent else None),
            prefix=path,
            parent_chain_hash=parent.chain_hash if parent else None,
            prompt_ids=turn.prompt,
            generated_ids=turn.generated,
            logprobs=turn.logprobs,
            weight_version=7,
        )
        calls.append(parent)
    return calls


def complete_cold(turns: list[Turn], prefixes: list[np.ndarray]) -> list[StagedCall]:
    """Complete the chain with plain ids as prefix, as after a fetch."""
    calls: list[StagedCall] = []
    parent: StagedCall | None = None
    for index, (turn, prefix) in enumerate(zip(turns, prefixes, strict=True)):
        parent = complete_call(
            CallIdentity("rollout-1", f"call-{index}", parent.identity.call_id if parent else None),
            prefix=prefix if parent else None,
            parent_chain_hash=parent.chain_hash if parent else None,
            prompt_ids=turn.prompt,
            generated_ids=turn.generated,
            logprobs=turn.logprobs,
            weight_version=7,
        )
        calls.append(parent)
    return calls


def fetch(stored: list[bytes]) -> list[StagedCall]:
    return [staged_call_from_proto(staged_call_pb2.StagedCall.FromString(raw)) for raw in stored]


def floor_of(staged: list[StagedCall], turns: list[Turn]) -> Floor:
    """Write every pre-image as the capture contract lays it out, and check it by its digest."""
    complete: list[bytes] = []
    verify: list[bytes] = []
    cumulative = b""
    for call, turn in zip(staged, turns, strict=True):
        path = np.concatenate((turn.prompt, turn.generated)).astype(">u8").tobytes()
        delta = path[8 * call.prev_len :]
        cumulative = b"nemo-gym-staging-prefix-v2" + _u64(call.cum_len) + path
        parent = staged[len(complete) // 3 - 1].chain_hash if complete else None
        marker = b"\x00" if parent is None else b"\x01" + parent
        chain = b"nemo-gym-staging-chain-v1" + marker + _u64(call.delta_len) + delta
        whole = _call_preimage(call, delta)
        for image, digest in (
            (cumulative, call.cumulative_hash),
            (chain, call.chain_hash),
            (whole, call.digest),
        ):
            if hashlib.sha256(image).digest() != digest:
                raise SystemExit("a pre-image is not the one that was digested")
        complete += [cumulative, chain, whole]
        verify += [chain, whole]
    return Floor(complete, [*verify, cumulative])


def _call_preimage(call: StagedCall, delta: bytes) -> bytes:
    identity, size = call.identity, call.delta_len
    parent = identity.parent_call_id
    lineage = b"\x00" if parent is None else b"\x01" + _text(parent)
    mask = np.repeat([0.0, 1.0], [call.carry_len, call.generation_len]).astype(">f4").tobytes()
    logprobs = np.concatenate((np.zeros(call.carry_len), call.logprobs)).astype(">f4").tobytes()
    lengths = struct.pack(">4Q", call.prev_len, size, call.cum_len, call.weight_version)
    columns = b"".join(
        _u64(8 + len(column)) + _u64(size) + column for column in (delta, mask, logprobs)
    )
    opening = b"nemo-gym-staging-call-v2\x02\x02\x01"
    names = _text(identity.capture_key) + _text(identity.call_id) + lineage + _text(call.mode)
    hashes = call.extras_digest + b"\x01" + call.chain_hash + b"\x01" + call.cumulative_hash
    return opening + names + lengths + columns + hashes


def _u64(value: int) -> bytes:
    return struct.pack(">Q", value)


def _text(value: str) -> bytes:
    return _u64(len(value.encode())) + value.encode()


def receipt_of(staged: list[StagedCall]) -> Receipt:
    manifest = tuple(
        CallRecord.of(call, f"resp-{index}", admitted_at=1.0) for index, call in enumerate(staged)
    )
    return Receipt("rollout-1", manifest, manifest[-1].call_id, terminal_selection="declared")


def load_peer() -> ModuleType | None:
    """Import the peer's staging package from its wheel, or say why not."""
    root = STATE / "nemo_gym-0.7.0"
    if not root.exists():
        STATE.mkdir(exist_ok=True)
        options = ["--no-deps", "--quiet", "--only-binary", ":all:"]
        options += ["--python-version", PEER_PYTHON, "--dest", str(STATE)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, PEER], check=True)
        wheel = next(STATE.glob("nemo_gym-0.7.0-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("nemo_gym/")]
            archive.extractall(root, names)
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module("nemo_gym.token_id_capture.staging")
    except ImportError as error:
        print(f"the peer cannot be imported here: {error}", file=sys.stderr)
        return None


class PeerChain:
    """The same chain through the peer's own capture and verifier."""

    def __init__(self, peer: ModuleType, turns: list[Turn]) -> None:
        capture = importlib.import_module(f"{peer.__name__}.capture")
        self.records = importlib.import_module(f"{peer.__name__}.records")
        self.verify_module = importlib.import_module(f"{peer.__name__}.rebuild")
        self.staged: list[Any] = []
        self.capture = capture.RolloutTokenCapture(sink=self, weight_version_fn=lambda: 7)
        self.turns = [
            (turn.prompt.tolist(), turn.generated.tolist(), turn.logprobs.tolist(), turn.prev_len)
            for turn in turns
        ]

    def stage(self, record: Any) -> Any:
        self.staged.append(record)
        return self.records.StageResult(ok=True, staging_key=record.staging_key)

    def complete(self) -> float:
        """Complete the chain; return the seconds in `begin_call` and `complete_call`."""
        self.staged.clear()
        spent = 0.0
        parent: Any = None
        for index, (prompt, generated, logprobs, prev_len) in enumerate(self.turns):
            admission = self.records.CaptureAdmission(
                rollout_id="rollout-1",
                model_call_id=f"call-{index}",
                mode="token_in" if parent else "text",
                parent_call_id=parent and parent.model_call_id,
                prev_len=prev_len,
                staging_chain=["rollout-1/x"] if parent else [],
                parent_chain_hash=parent and parent.chain_hash,
            )
            prefix = prompt[:prev_len] if parent else None
            begin = time.perf_counter()
            call = self.capture.begin_call(admission, prefix_token_ids=prefix)
            parent = self.capture.complete_call(
                call,
                prompt_token_ids=prompt,
                generated_token_ids=generated,
                generated_logprobs=logprobs,
            )
            spent += time.perf_counter() - begin
        return spent

    def record_of(self, staged: Any, index: int) -> Any:
        return self.records.CallRecord(
            **{name: getattr(staged, name) for name in SHARED_FIELDS},
            response_id=f"resp-{index}",
            admitted_at=1.0,
        )

    def prepare_verify(self, digests: list[bytes]) -> tuple[Any, list[Any]]:
        """Build receipt and snapshots; both sides must have made the same digests."""
        if [record.digest for record in self.staged] != [digest.hex() for digest in digests]:
            raise SystemExit("the two sides digest differently")
        manifest = [self.record_of(record, index) for index, record in enumerate(self.staged)]
        receipt = self.records.RolloutReceipt(
            rollout_id="rollout-1",
            terminal_model_call_id=manifest[-1].model_call_id,
            terminal_selection="declared",
            manifest=manifest,
        )
        return receipt, list(self.staged)

    def store(self, snapshots: list[Any]) -> list[bytes]:
        names = set(self.records.StagedCallBaseSnapshot.model_fields)
        return [snapshot.model_dump_json(include=names).encode() for snapshot in snapshots]

    def fetch(self, stored: list[bytes]) -> list[Any]:
        return [self.records.StagedCallBaseSnapshot.model_validate_json(raw) for raw in stored]


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def sha256_all(images: list[bytes]) -> None:
    for image in images:
        hashlib.sha256(image).digest()


def ours_of(turns: list[Turn]) -> tuple[list[StagedCall], Works]:
    """Make the chain, and name what is timed of it."""
    prefixes = [turn.prompt[: turn.prev_len].copy() for turn in turns]
    staged = complete_ours(turns)
    if [c.digest for c in complete_cold(turns, prefixes)] != [c.digest for c in staged]:
        raise SystemExit("a cold prefix digests differently")
    floor = floor_of(staged, turns)
    receipt = receipt_of(staged)
    completion = completion_pb2.Completion(finish_reason="stop")
    stored = [staged_call_to_proto(call, b"", completion).SerializeToString() for call in staged]
    works: dict[str, Callable[[], object]] = {
        "complete": lambda: complete_ours(turns),
        "complete_cold": lambda: complete_cold(turns, prefixes),
        "verify": lambda: verify_and_linearize(receipt, staged),
        "fetch_verify": lambda: verify_and_linearize(receipt, fetch(stored)),
        "complete_floor": lambda: sha256_all(floor.complete),
        "verify_floor": lambda: sha256_all(floor.verify),
    }
    return staged, {name: partial(timed, work) for name, work in works.items()}


def peer_of(peer: ModuleType, turns: list[Turn], staged: list[StagedCall]) -> Works:
    """Make the same chain with the peer, and name what is timed of it."""
    chain = PeerChain(peer, turns)
    chain.complete()
    receipt, snapshots = chain.prepare_verify([call.digest for call in staged])
    stored = chain.store(snapshots)
    verify = chain.verify_module.verify_and_linearize
    return {
        "peer_complete": chain.complete,
        "peer_verify": partial(timed, lambda: verify(receipt, snapshots)),
        "peer_fetch_verify": partial(timed, lambda: verify(receipt, chain.fetch(stored))),
    }


def measure(calls: int, tokens: int, peer: ModuleType | None, rounds: int) -> Times:
    turns = turns_of(calls, tokens)
    staged, works = ours_of(turns)
    repeats = dict.fromkeys(works, OURS_PER_ROUND)
    if peer is not None:
        works |= peer_of(peer, turns, staged)
    seconds: Times = {name: [] for name in works}
    for _ in range(rounds):
        gc.collect()
        for name, work in works.items():
            seconds[name] += [work() for _ in range(repeats.get(name, 1))]
    return seconds


def results(measured: list[Times]) -> dict[str, float]:
    """Sum up all chains: the worst ratios, the longest times, the speedup on each."""
    least = [{name: min(times) for name, times in chain.items()} for chain in measured]
    middle = [{name: median(times) for name, times in chain.items()} for chain in measured]
    result: dict[str, float] = {}
    sides = (
        ("complete_call", "complete", "peer_complete", "complete_floor"),
        ("complete_call_cold", "complete_cold", "peer_complete", "complete_floor"),
        ("verify", "verify", "peer_verify", "verify_floor"),
        ("fetch_verify", "fetch_verify", "peer_fetch_verify", "verify_floor"),
    )
    for key, ours, theirs, floor in sides:
        result[f"{key}_ms_max"] = max(s[ours] for s in least) * 1e3
        result[f"{key}_over_sha256_max"] = max(s[ours] / s[floor] for s in least)
        if theirs in least[0]:
            speedups = [s[theirs] / s[ours] for s in least]
            result |= {f"{key}_speedup_{n}": x for (n, _), x in zip(CHAINS, speedups, strict=True)}
            result[f"{key}_speedup_min"] = min(speedups)
            result[f"{key}_speedup_median_min"] = min(s[theirs] / s[ours] for s in middle)
            result[f"{key}_floor_speedup_min"] = min(s[theirs] / s[floor] for s in least)
            result[f"peer_{key}_ms_max"] = max(s[theirs] for s in least) * 1e3
    return {name: round(value, 3) for name, value in result.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    peer = load_peer()
    gc.disable()
    del [bytearray(16 * 2**20)][0]  # glibc keeps freed blocks up to the largest it has seen
    measured = []
    for calls, tokens in CHAINS:
        seconds = measure(calls, tokens, peer, rounds)
        measured.append(seconds)
        pairs = ((name, min(t) * 1e3, median(t) * 1e3) for name, t in seconds.items())
        shown = ", ".join(f"{name} {least:.2f}/{middle:.2f}" for name, least, middle in pairs)
        print(f"{calls} calls, {tokens} tokens, least/median ms: {shown}")
    print("RESULT " + json.dumps(results(measured)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
