"""Time custody beside nemo-gym 0.7.0: complete a call, and verify and linearize a chain.

Each side works in its native form in this process: ours on numpy columns, the peer on lists and
pydantic models, both on the same tokens. The peer's wheel is downloaded once, without
dependencies; when its own needs (pydantic, orjson) are not met, only our side is timed. Timings are
the best of several interleaved rounds, because machines are shared. The floor is hashlib.sha256
over exactly the pre-images of each side's digests; a check proves that they are.

    python benchmarks/custody.py [--rounds N]

Last line: `RESULT {json}`.
"""

from __future__ import annotations

import argparse
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
from types import ModuleType
from typing import Any

import numpy as np

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.verification import verify_and_linearize

STATE = Path(__file__).resolve().parent.parent / ".state"
PEER = "nemo-gym==0.7.0"
PEER_PYTHON = "3.13.14"
CHAINS = ((20, 11_000), (50, 22_000), (100, 34_000))
OURS_PER_ROUND = 5
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


def complete_ours(turns: list[Turn], prefixes: list[np.ndarray]) -> list[StagedCall]:
    staged: list[StagedCall] = []
    for index, (turn, prefix) in enumerate(zip(turns, prefixes, strict=True)):
        parent = staged[-1] if staged else None
        call = complete_call(
            CallIdentity("rollout-1", f"call-{index}", parent and parent.identity.call_id),
            prefix=prefix if parent else None,
            parent_chain_hash=parent and parent.chain_hash,
            prompt_ids=turn.prompt,
            generated_ids=turn.generated,
            logprobs=turn.logprobs,
            weight_version=7,
        )
        CallRecord.of(call, f"resp-{index}", admitted_at=1.0)
        staged.append(call)
    return staged


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
        """Complete the chain; return the seconds spent.

        Counted is what our side does too: authorising the prefix (the peer's begin), completing,
        and the ledger row. Left out is the peer's parsing of admissions.
        """
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
            self.record_of(self.staged[-1], index)
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


def best(current: float, work: Callable[[], object], times: int = OURS_PER_ROUND) -> float:
    for _ in range(times):
        begin = time.perf_counter()
        work()
        current = min(current, time.perf_counter() - begin)
    return current


def sha256_all(images: list[bytes]) -> None:
    for image in images:
        hashlib.sha256(image).digest()


def measure(calls: int, tokens: int, peer: ModuleType | None, rounds: int) -> dict[str, float]:
    turns = turns_of(calls, tokens)
    prefixes = [turn.prompt[: turn.prev_len].copy() for turn in turns]
    staged = complete_ours(turns, prefixes)
    floor = floor_of(staged, turns)
    receipt = receipt_of(staged)
    names = ("complete", "verify", "complete_floor", "verify_floor")
    seconds = dict.fromkeys((*names, "peer_complete", "peer_verify"), float("inf"))
    theirs = None if peer is None else PeerChain(peer, turns)
    peer_receipt: Any = None
    snapshots: list[Any] = []
    if theirs is not None:
        theirs.complete()
        peer_receipt, snapshots = theirs.prepare_verify([call.digest for call in staged])
    ours: dict[str, Callable[[], object]] = {
        "complete": lambda: complete_ours(turns, prefixes),
        "verify": lambda: verify_and_linearize(receipt, staged),
        "complete_floor": lambda: sha256_all(floor.complete),
        "verify_floor": lambda: sha256_all(floor.verify),
    }
    for _ in range(rounds):
        for name, work in ours.items():
            seconds[name] = best(seconds[name], work)
        if theirs is not None:
            seconds["peer_complete"] = min(seconds["peer_complete"], theirs.complete())
            verify = partial(theirs.verify_module.verify_and_linearize, peer_receipt, snapshots)
            seconds["peer_verify"] = best(seconds["peer_verify"], verify, times=1)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    peer = load_peer()
    measured = []
    for calls, tokens in CHAINS:
        seconds = measure(calls, tokens, peer, rounds)
        measured.append(seconds)
        shown = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
        print(f"{calls} calls, {tokens} tokens: {shown}")
    result: dict[str, float] = {
        "complete_call_over_sha256_max": max(s["complete"] / s["complete_floor"] for s in measured),
        "verify_over_sha256_max": max(s["verify"] / s["verify_floor"] for s in measured),
        "complete_call_ms_max": max(s["complete"] for s in measured) * 1e3,
        "verify_ms_max": max(s["verify"] for s in measured) * 1e3,
    }
    if peer is not None:
        result |= {
            "complete_call_speedup_min": min(s["peer_complete"] / s["complete"] for s in measured),
            "verify_speedup_min": min(s["peer_verify"] / s["verify"] for s in measured),
            "peer_complete_call_ms_max": max(s["peer_complete"] for s in measured) * 1e3,
            "peer_verify_ms_max": max(s["peer_verify"] for s in measured) * 1e3,
        }
    print("RESULT " + json.dumps({name: round(value, 3) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
