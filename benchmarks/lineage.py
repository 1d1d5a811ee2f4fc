"""What finding a call's predecessor costs in forest mode, and what of it is kept, turn by turn.

One rollout of 512 calls: a system message, four tools, observations of some 600 characters, answers
of some 300. The gateway's reader and the ledger's core are the real ones, in this process, without
channels, disk or engine; what is timed is processor time of this thread, the least of many
repetitions, with the garbage collector off.

    turn512_over_turn8          admission of a delta request: the gateway's reading, probe and
                                announcement, and the ledger's verdict; turn 512 over turn 8
    ..._without_body            the same without joining the kept turns to the engine's request,
                                which grows with what the engine is sent
    metadata_bytes_512_over_8_per_call
                                bytes of the ledger's events (intents and records) for each call, of
                                an attempt of 512 calls over one of 8
    http_turn512_over_parse_digest
                                reading a whole-history Chat request at turn 512, over parsing the
                                same body and digesting it; ..._responses: of a Responses request;
                                ..._unknown: of a history that the gateway does not keep
    kept_bytes_per_byte         what the kept histories take for each byte of conversation

    python benchmarks/lineage.py [--rounds N]

Last line: `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    attempt_pb2,
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
)
from callforest.worker.v1 import worker_service_pb2
from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.forest_reading import ForestReader
from callforest_mesh.gateway.histories import Histories
from callforest_mesh.gateway.json_body import parse_body
from callforest_mesh.ledger import commits
from callforest_mesh.ledger import core as ledger
from callforest_mesh.ledger.attempt import AttemptView

CALLS = 512
EARLY = 8
KEY = "rollout"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Looks something up and says what it found. " * 3,
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    for number in range(4)
]
SYSTEM = {"role": "system", "content": "You are an agent that answers questions. " * 10}
NOW = timestamp_pb2.Timestamp(seconds=1_700_000_000)
CONFIGURATION = bytes([7]) * 32


def least_us(work: Callable[[], object], rounds: int) -> float:
    """Give the least processor time of a piece of work, in microseconds."""
    best = float("inf")
    gc.disable()
    for _ in range(rounds):
        begun = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - begun)
    gc.enable()
    return best / 1000


def observation(number: int) -> str:
    return f"Observation {number}: " + "the tool has found this line of text. " * 16


def answer(number: int) -> str:
    return f"Thought {number}: " + "next the agent should look there. " * 9


@dataclass
class Rollout:
    """One rollout as it goes: the harness's history, the gateway's memory, the ledger's view."""

    dialect: Dialect = Dialect.CHAT
    histories: Histories = field(default_factory=lambda: Histories(1 << 30, 1 << 20))
    turns: list[object] = field(default_factory=lambda: [SYSTEM])
    calls: int = 0
    ledger_bytes: int = 0

    def __post_init__(self) -> None:
        self.reader = ForestReader(self.histories)
        mode = attempt_pb2.CAPTURE_MODE_FOREST
        opened = ledger.opened_event("t", KEY, 0, "5eed", mode)
        self.view = AttemptView(opened.attempt_opened)

    def body(self, *, whole: bool = True) -> bytes:
        """Write the next request: with its whole history, or what is new of it."""
        turns = self.turns if whole else self.turns[-1:]
        fields = {"model": "m", core.turns_name(self.dialect): turns, "tools": self._tools()}
        return json.dumps(fields).encode()

    def observe(self) -> None:
        """Let the harness see something."""
        self.turns.append({"role": "user", "content": observation(self.calls)})

    def claim(self) -> Claim:
        """Name the last call, as a delta request does."""
        return Claim(f"call-{self.calls - 1}", history_is_whole=False)

    def read(self, body: bytes, claim: Claim | None = None) -> core.NormalisedRequest:
        return self.reader.read(KEY, body, self.dialect, claim)

    def judge(
        self, request: core.NormalisedRequest, call_id: str = "call-x"
    ) -> ledger.Decision[capture_admission_pb2.Verdict]:
        """Announce a call and have it judged; the log does not grow by it."""
        intent = core.intent_of(request, KEY, call_id, NOW, CONFIGURATION)
        return ledger.record_intent(self.view, intent)

    def serve(self, request: core.NormalisedRequest) -> None:
        """Take the call to its record."""
        call_id = f"call-{self.calls}"
        self._apply(announced := self.judge(request, call_id))
        message = {"role": "assistant", "content": answer(self.calls)}
        completion = {"id": f"chatcmpl-{call_id}", "choices": [{"message": message}]}
        served = core.read_response(json.dumps(completion).encode(), request)
        generated = self._generated(announced.answer, call_id)
        record = core.record_of(generated, request, served, NOW)
        self._apply(commits.commit_record(self.view, record))
        request.evidence.keep(call_id, served)
        said = json.loads(served.body)
        self.turns += said["output"] if self.dialect is Dialect.RESPONSES else [message]
        self.calls += 1

    def _apply(self, decision: ledger.Decision[object]) -> None:
        for event in decision.events:
            self.view.apply(event)
            self.ledger_bytes += event.ByteSize()

    def _tools(self) -> list[object]:
        if self.dialect is Dialect.CHAT:
            return [*TOOLS]
        return [{"type": "function", **tool["function"]} for tool in TOOLS]

    def _generated(
        self, verdict: capture_admission_pb2.Verdict, call_id: str
    ) -> worker_service_pb2.GeneratedCall:
        digests = ("digest", "extras_digest", "chain_hash", "cumulative_hash")
        coords = commit_coords_pb2.CommitCoords(
            capture_key=KEY,
            call_id=call_id,
            delta_token_count=200,
            **{name: hashlib.sha256(f"{name} {call_id}".encode()).digest() for name in digests},
        )
        decision = capture_admission_pb2.CaptureDecision(
            input=capture_admission_pb2.CAPTURE_INPUT_ROOT
        )
        if verdict.WhichOneof("verdict") == "continuation":
            coords.parent_call_id = verdict.continuation.parent_call_id
            coords.prev_token_count = verdict.continuation.prev_token_count
            decision.input = capture_admission_pb2.CAPTURE_INPUT_SPLICED
            decision.prefix_cut = decision.render_cut = verdict.continuation.prev_token_count
            decision.proof = coords.digest
        completed = completion_pb2.Completion(
            status=completion_pb2.COMPLETION_STATUS_COMPLETED,
            finish_reason="stop",
            generation_token_count=80,
            weight_version_count=1,
        )
        return worker_service_pb2.GeneratedCall(
            staged=coords, completion=completed, decision=decision
        )


def admission_us(rollout: Rollout, rounds: int) -> tuple[float, float]:
    """Time a delta's admission, and its reading alone without the joining of the body."""
    body, claim = rollout.body(whole=False), rollout.claim()
    verdict = rollout.judge(rollout.read(body, claim)).answer
    assert verdict.continuation.parent_call_id == claim.call_id, verdict
    whole = least_us(lambda: rollout.judge(rollout.read(body, claim)), rounds)
    kept = rollout.histories.get(KEY, claim.call_id)
    assert kept is not None
    joined = least_us(lambda: b",".join(kept.messages()), rounds)
    return whole, whole - joined


def http_ratio(rollout: Rollout, rounds: int, histories: Histories | None = None) -> float:
    """Time the reading of a whole-history request beside the parsing and digesting of its body."""
    body = rollout.body()
    reader = rollout.reader if histories is None else ForestReader(histories)
    read = least_us(lambda: reader.read(KEY, body, rollout.dialect), rounds)
    parsed = least_us(lambda: parse_body(body), rounds)
    digested = least_us(lambda: hashlib.sha256(body).digest(), rounds)
    return read / (parsed + digested)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    deltas, whole, responses = Rollout(), Rollout(), Rollout(Dialect.RESPONSES)
    admission: dict[int, tuple[float, float]] = {}
    bytes_a_call: dict[int, float] = {}
    http: list[float] = []
    for turn in range(1, CALLS + 1):
        for rollout in (deltas, whole, responses):
            rollout.observe()
        if turn in (EARLY, CALLS):
            admission[turn] = admission_us(deltas, rounds)
        if turn == CALLS:
            http = [http_ratio(one, rounds // 4) for one in (whole, responses)]
        first = turn == 1
        deltas.serve(deltas.read(deltas.body(whole=first), None if first else deltas.claim()))
        for rollout in (whole, responses):
            rollout.serve(rollout.read(rollout.body()))
        if turn in (EARLY, CALLS):
            bytes_a_call[turn] = deltas.ledger_bytes / turn
    whole.observe()
    unknown = http_ratio(whole, rounds // 8, Histories(0, 0))
    text = len(json.dumps(deltas.turns))
    result = {
        "turn512_over_turn8": round(admission[CALLS][0] / admission[EARLY][0], 3),
        "turn512_over_turn8_without_body": round(admission[CALLS][1] / admission[EARLY][1], 3),
        "admission_us_turn8": round(admission[EARLY][0], 1),
        "admission_us_turn512": round(admission[CALLS][0], 1),
        "metadata_bytes_512_over_8_per_call": round(bytes_a_call[CALLS] / bytes_a_call[EARLY], 3),
        "metadata_bytes_per_call": round(bytes_a_call[CALLS], 1),
        "http_turn512_over_parse_digest": round(http[0], 3),
        "http_turn512_over_parse_digest_responses": round(http[1], 3),
        "http_turn512_over_parse_digest_unknown": round(unknown, 3),
        "http_body_bytes": len(whole.body()),
        "kept_bytes_per_byte": round(deltas.histories.size_bytes / text, 2),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
