"""Unary calls: a deadline always, repeats while the service is away, typed errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from callforest_client.errors import error_of_rpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
AnswerT = TypeVar("AnswerT")

_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 1.0
# A server that shuts down resets calls that reach it too late; our own cancelling is no error here.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
    request: RequestT,
    *,
    timeout_s: float,
    repeatable: bool = True,
) -> ResponseT:
    """Call a method; repeat it while the service is unavailable and time is left.

    Raises:
        RefusedError: the service refused.
        UnavailableError: no answer within `timeout_s`.
    """

    async def once(left_s: float) -> ResponseT:
        return await method(request, timeout=left_s)

    return await repeated(once, timeout_s, repeatable=repeatable)


async def read_all(
    method: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
    request: RequestT,
    *,
    timeout_s: float,
) -> list[ResponseT]:
    """Read a whole answer that comes as a stream; begin anew while the service is unavailable.

    Raises:
        RefusedError: the service refused.
        UnavailableError: no whole answer within `timeout_s`.
    """

    async def once(left_s: float) -> list[ResponseT]:
        return [response async for response in method(request, timeout=left_s)]

    return await repeated(once, timeout_s)


async def repeated(
    once: Callable[[float], Awaitable[AnswerT]], timeout_s: float, *, repeatable: bool = True
) -> AnswerT:
    """Try until it works, is refused, or the time is up.

    Repeats wait a random part of a delay that doubles from 50 ms to 1 s, so that the clients of a
    restarted service do not come back together.

    Args:
        once: one try, given the seconds that are left.
        timeout_s: of all tries together.
        repeatable: whether there may be more than one.

    Raises:
        RefusedError: the service refused.
        UnavailableError: no answer within `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    backoff_s = _BACKOFF_FIRST_S
    while True:
        try:
            return await once(max(0.001, deadline - loop.time()))
        except grpc.aio.AioRpcError as error:
            pause_s = random.uniform(0, backoff_s)  # noqa: S311 - spreads load, guards nothing
            away = error.code() in _AWAY
            if not (repeatable and away and loop.time() + pause_s < deadline):
                raise error_of_rpc(error) from None
            await asyncio.sleep(pause_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_LAST_S)


async def stream(
    method: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
    request: RequestT,
    *,
    timeout_s: float,
) -> AsyncIterator[ResponseT]:
    """Call a method that answers with a stream, and give its messages.

    Raises:
        RefusedError: the service refused.
        UnavailableError: the stream broke, or did not end within `timeout_s`.
    """
    try:
        async for response in method(request, timeout=timeout_s):
            yield response
    except grpc.aio.AioRpcError as error:
        raise error_of_rpc(error) from None
