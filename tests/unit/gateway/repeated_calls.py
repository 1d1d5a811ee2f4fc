"""Calls that come again, and what the services behind the gateway know of them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from callforest.capture.v1 import capture_admission_pb2, staged_call_pb2
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import Identity
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.life import Served
from callforest_mesh.gateway.refusals import HttpRefusal
from tests.unit.gateway.played_services import (
    COMPLETION,
    REQUEST,
    RESPONSE,
    ROOT,
    Played,
    calls_of,
    coords,
)

KEYED = Identity("c0")
MARKED = Identity(is_marked=True)
OTHER = core.read_request(b'{"messages":[{"role":"user","content":"other"}]}')
PENDING = capture_admission_pb2.EARLIER_STATE_PENDING
COMMITTED = capture_admission_pb2.EARLIER_STATE_COMMITTED
FAILED = capture_admission_pb2.EARLIER_STATE_FAILED
FIRST_S = 1_600_000_000


def earlier(
    state: capture_admission_pb2.EarlierState.ValueType,
    call_id: str = "c0",
    verdict: capture_admission_pb2.Verdict = ROOT,
) -> capture_admission_pb2.Verdict:
    repeated = capture_admission_pb2.Verdict()
    repeated.CopyFrom(verdict)
    repeated.earlier.call_id, repeated.earlier.state = call_id, state
    repeated.earlier.admit_time.FromSeconds(FIRST_S)
    return repeated


def kept(call_id: str = "c0") -> staged_call_pb2.StagedCall:
    """Make a staged call as it is fetched: without its columns."""
    made = coords(call_id=call_id)
    return staged_call_pb2.StagedCall(
        capture_key="k",
        call_id=call_id,
        canonical=staged_call_pb2.CanonicalColumns(carry_token_count=4),
        served_response=RESPONSE,
        completion=COMPLETION,
        **{
            name: getattr(made, name)
            for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
        },
    )


async def ask(played: Played, identity: Identity = KEYED, **options: object) -> Served:
    calls = calls_of(played, **options)
    try:
        return await calls.serve("k", REQUEST, identity)
    finally:
        await calls.settle(5.0)


async def refusal_of(asked: Awaitable[object]) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        await asked
    return caught.value


class Held:
    """Something that a test holds until it lets it go."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go.wait()


def began(calls: Calls, identity: Identity = KEYED) -> "asyncio.Future[Served]":
    return asyncio.ensure_future(calls.serve("k", REQUEST, identity))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never held")


async def hang_up(harness: "asyncio.Future[Served]") -> None:
    harness.cancel()
    await asyncio.wait({harness})
