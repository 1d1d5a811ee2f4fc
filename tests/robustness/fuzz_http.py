"""Every HTTP route of the gateway, fed with broken requests, and what may come back."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import random
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

from aiohttp import web

from callforest_client.ledger import LedgerClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.gateway.edge import Edge
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.work import Work
from tests.robustness.fuzz_rpc import ANSWER_S, Tally, fault_of_text
from tests.robustness.mutation import broken_json, wrong_at_every_key

GO: Final = {"role": "user", "content": "go"}
_TOOL: Final = {
    "name": "look",
    "description": "looks",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CHAT_BODY: Final[dict[str, object]] = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {
            "role": "assistant",
            "content": "looking",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "it"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ],
    "tools": [{"type": "function", "function": _TOOL}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 1.0,
    "max_tokens": 8,
    "stop": ["x"],
    "seed": 1,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
}
RESPONSES_BODY: Final[dict[str, object]] = {
    "model": "scripted",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {
            "type": "reasoning",
            "id": "rs1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "m1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "looking", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ],
    "tools": [{"type": "function", **_TOOL}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "max_output_tokens": 8,
    "include": ["message.output_text.logprobs"],
    "store": False,
    "stream": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
}
OPEN: Final = 3
"""So many capture keys are of attempts that take calls."""
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")


@dataclass(frozen=True, slots=True)
class Route:
    """One route of the gateway: its method, and its path with places in braces."""

    method: str
    path: str


def routes() -> list[Route]:
    """Find every route that the gateway serves."""
    nobody = object()
    edge = Edge(
        GatewayOptions(),
        Drain(),
        cast("Work", nobody),
        cast("LedgerClient", nobody),
        cast("WorkerClient", nobody),
    )
    return [
        Route(route.method, cast("web.Resource", route.resource).canonical)
        for route in edge.application().router.routes()
        if route.method != "HEAD"  # aiohttp adds it to each GET
    ]


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        content: its bytes.
        is_http: whether they are an HTTP request at all.
        whole: whether all bytes that it announces are there; else its sender leaves early.
    """

    content: bytes
    is_http: bool = True
    whole: bool = True


class HttpFuzz:
    """Sends broken requests to a gateway.

    Args:
        host: where it listens.
        port: where it listens.
        chance: decides.
        capture_keys: open attempts first, then others.
        control_token: of the control route.
        tally: where answers are counted.
    """

    def __init__(
        self,
        address: tuple[str, int],
        chance: random.Random,
        capture_keys: list[str],
        control_token: str,
        tally: Tally,
    ) -> None:
        self._address = address
        self._chance = chance
        self._keys = capture_keys
        self._token = control_token
        self._tally = tally

    def requests(self, route: Route) -> Iterator[Request]:
        """Give requests to one route, all of them different."""
        if route.method == "POST":
            body = RESPONSES_BODY if route.path.endswith("responses") else CHAT_BODY
            broken = [*wrong_at_every_key(body), *broken_json(body, self._chance)]
            self._chance.shuffle(broken)
            for one in broken:
                yield self._request(route, one)
                if self._chance.random() < 0.1:
                    yield from self._odd(route, one)
        while True:
            yield from self._odd(route, json.dumps(CHAT_BODY).encode("ascii"))

    async def send(self, route: Route, request: Request) -> None:
        """Send one request on a connection of its own; take what comes back."""
        self._tally.messages += 1
        where = f"{route.method} {route.path}"
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._exchange(request)
        except TimeoutError:
            self._tally.count(where, "HANGS", f"no end within {ANSWER_S} s", request.content)
            return
        named, fault = fault_of_answer(answer, request)
        self._tally.count(where, named, fault, request.content)

    async def _exchange(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request.content)
            await writer.drain()
            if not request.whole:
                writer.write_eof()
            return await reader.read()
        except ConnectionError:  # it refused before it had read everything
            return await _left(reader)
        finally:
            writer.close()

    def _request(
        self, route: Route, body: bytes, *, method: str = "", path: str = "", headers: bytes = b""
    ) -> Request:
        named = path or self._path(route)
        head = f"{method or route.method} {named} HTTP/1.1\r\nHost: mesh\r\nConnection: close\r\n"
        bearer = b"" if b"uthorization" in headers else self._bearer(route)
        length = b"" if b"Content-Length" in headers else b"Content-Length: %d\r\n" % len(body)
        content = head.encode("utf-8") + length + bearer + headers + b"\r\n" + body
        return Request(content, whole=b"Content-Length" not in headers)

    def _path(self, route: Route) -> str:
        key = self._chance.choice(self._keys[:OPEN])
        return re.sub(r"\{\w+\}", key, route.path)

    def _bearer(self, route: Route) -> bytes:
        token = self._token if "control" in route.path else self._chance.choice(self._keys[:OPEN])
        return f"Authorization: Bearer {token}\r\n".encode()

    def _odd(self, route: Route, body: bytes) -> Iterator[Request]:
        """Give requests that are odd outside their body."""
        key = self._chance.choice(
            [*self._keys, "nobody", "%00", "%ff", "a%2fb", "x" * 200, "..", "caf%C3%A9", "%20", "%"]
        )
        yield self._request(route, body, path=re.sub(r"\{\w+\}", key, route.path))
        for headers in self._headers(body):
            if self._chance.random() < 0.35:
                yield self._request(route, body, headers=headers)
        yield self._request(route, body, method=self._chance.choice(_METHODS))
        yield self._request(route, body, path=f"{self._path(route)}{self._chance.choice(_TAILS)}")
        for content in self._no_requests(route, body):
            if self._chance.random() < 0.2:
                yield Request(content, is_http=False, whole=b"chunked" not in content)

    def _headers(self, body: bytes) -> Iterator[bytes]:
        for bearer in (
            *(
                "",
                "Bearer",
                "Bearer ",
                "bearer a b",
                "Basic eA==",
                "Bearer caf\u00e9",
                "Bearer a/b",
            ),
            *(f"Bearer {'x' * 200}", "Bearer nobody"),
        ):
            yield f"Authorization: {bearer}\r\n".encode()
        yield b"Authorization: Bearer \xff\xfe\r\n"
        for coding in ("gzip", "deflate", "br", "zstd", "bogus", "identity", "gzip, gzip"):
            yield f"Content-Encoding: {coding}\r\n".encode()
        for kind in ("text/html", "application/json; charset=bogus", "", "multipart/form-data"):
            yield f"Content-Type: {kind}\r\n".encode()
        for trace in ("", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-zz", "\u00e9"):
            yield f"traceparent: {trace}\r\n".encode()
        yield b"Expect: 100-continue\r\n"
        yield b"Accept: text/html\r\nRange: bytes=0-1\r\nIf-Match: x\r\n"
        yield b"Cookie: " + b"a=b; " * 200 + b"\r\n"
        yield b"x-request-id: " + self._chance.randbytes(8).hex().encode() + b"\r\n"
        yield b"Content-Length: %d\r\n" % (len(body) + 100)
        yield b"Content-Length: %d\r\n" % (1 << 40)

    def _no_requests(self, route: Route, body: bytes) -> Iterator[bytes]:
        whole = self._request(route, body).content
        at = self._chance.randrange(20)
        yield whole[:at] + self._chance.randbytes(3) + whole[at + 3 :]
        yield whole.replace(b"HTTP/1.1", b"HTTP/9.9")
        yield self._chance.randbytes(100) + b"\r\n\r\n"
        yield self._request(route, body, headers=b"bad header\r\n").content
        yield self._request(route, body, headers=b"X: " + b"y" * 20_000 + b"\r\n").content
        yield self._request(route, body, headers=b"X: a\0b\r\n").content
        yield self._request(route, body, headers=b"Authorization: Bearer \x7f\r\n").content
        yield self._request(route, body, method="BREW").content
        yield self._request(route, body, headers=b"Content-Length: -1\r\n").content
        yield self._request(route, body, headers=b"Expect: the-impossible\r\n").content
        yield self._request(
            route,
            b"zz\r\nnonsense\r\n",
            headers=b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        ).content
        yield self._request(route, body, path="/" + "x" * 9_000).content
        chunked = self._request(route, b'5\r\n{"a"', headers=b"Transfer-Encoding: chunked\r\n")
        yield re.sub(rb"Content-Length: \d+\r\n", b"", chunked.content)


_TAILS: Final = ("/", "?a=b", "?%00", "//x", "/../healthz", "#x", "?" + "q=1&" * 300)


def fault_of_answer(answer: bytes, request: Request) -> tuple[str, str | None]:
    """Give the code of an answer, and what is wrong with it."""
    if not answer:
        return (
            "CLOSED",
            "no answer to a whole request" if request.whole and request.is_http else None,
        )
    played = cast("socket.socket", _Played(answer))
    asked = request.content.partition(b" ")[0].decode("latin-1")
    response = http.client.HTTPResponse(played, method=asked)
    try:
        response.begin()
        body = response.read()
    except http.client.HTTPException as error:
        return "BROKEN", f"no HTTP answer: {error!r}: {answer[:200]!r}"
    status = response.status
    kind = response.headers.get_content_type()
    if (fault := fault_of_text(body.decode("utf-8", "replace"))) is not None:
        return str(status), fault
    if status < 400:
        return str(status), _fault_of_success(body, kind)
    if status >= 500:
        return str(status), f"bad input makes {status}: {body[:300]!r}"
    if asked == "HEAD":
        return str(status), None
    try:
        error = json.loads(body)["error"]
        code = str(error["code"])
        complete = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        return str(status), f"an error without a form: {status} {kind} {body[:300]!r}"
    return code, None if complete else f"half an error: {error}"


def _fault_of_success(body: bytes, kind: str) -> str | None:
    if kind == "text/event-stream":
        return None
    try:
        json.loads(body or b"{}")
    except ValueError:
        return f"no JSON: {body[:200]!r}"
    return None


class _Played:
    """An answer that was read, as what `http.client` reads from."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


async def _left(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
