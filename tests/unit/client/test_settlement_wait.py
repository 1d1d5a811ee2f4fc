"""A wait for settlement ends when it is over, though its ledger is restarted meanwhile (LED-6)."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.ledger.v1 import ledger_service_pb2 as pb
from callforest_client.ledger import LedgerClient

AWAY = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "killed"
)


class DyingLedgers:
    """A channel to ledgers of which each dies a while into the wait, but for the last.

    Args:
        lives: how long each of the dying ones lives, in seconds.
        pass_time: lets so many seconds pass.
    """

    def __init__(self, lives: list[float], pass_time: Callable[[float], None]) -> None:
        self._lives = list(lives)
        self._pass_time = pass_time
        self.waits_ms: list[int] = []
        self.deadlines_s: list[float] = []

    def unary_unary(self, *_, **__):
        return self._await_settled

    def __getattr__(self, name: str):
        return lambda *_, **__: None

    async def _await_settled(self, request, **given):
        self.waits_ms.append(request.wait_ms)
        self.deadlines_s.append(given["timeout"])
        if self._lives:
            self._pass_time(self._lives.pop(0))
            raise AWAY
        waiting = attempt_pb2.Attempt(pending_call_ids=["c1"])
        return pb.AwaitSettledResponse(attempt=waiting)


@pytest.mark.requirement("LED-6")
async def test_a_restarted_ledger_is_asked_for_what_is_left_of_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    clock, passed = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: clock() + passed[0])

    def pass_time(seconds: float) -> None:
        passed[0] += seconds

    ledgers = DyingLedgers([100.0, 150.0, 55.0], pass_time)
    client = LedgerClient(ledgers, timeout_s=10.0)
    attempt = await client.await_settled("r1", wait_s=300.0)
    assert list(attempt.pending_call_ids) == ["c1"], "the answer says that it did not settle"
    waits_s = [round(wait_ms / 1000) for wait_ms in ledgers.waits_ms]
    assert waits_s[0] == 300
    assert 199 <= waits_s[1] <= 200
    assert 48 <= waits_s[2] <= 50
    assert waits_s[3] == 0, "the wait is over: the ledger says at once what is pending"
    assert all(
        deadline_s >= wait_ms / 1000
        for deadline_s, wait_ms in zip(ledgers.deadlines_s, ledgers.waits_ms, strict=True)
    )
