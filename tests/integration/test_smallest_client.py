"""The walk through the smallest client in docs/protocol.md works as it stands."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from callforest_client.channel import connect
from tests.integration.running_mesh import running

WAIT_S = 60.0
PAGE = Path(__file__).parents[2] / "docs/protocol.md"


def steps() -> Iterator[tuple[str, str]]:
    """Give each method of the walk with its request, as the page has them."""
    section = PAGE.read_text("utf-8").partition("### 1.1 ")[2]
    block = section.split("```")[1].strip()
    for step in re.split(r"\n(?=callforest)", block):
        method, _, request = step.partition("\n")
        yield method, request


def filled(request: str, known: dict[str, str]) -> dict[str, object]:
    """Put what is known into a request, and the bytes that it shows into base64."""
    for name, value in known.items():
        request = request.replace(f"{{{name}}}", value)
    read = json.loads(request)
    for item in read.get("items", []):
        shown = json.dumps(item["call"]["request"]).encode()
        item["call"]["request"] = base64.b64encode(shown).decode()
    return read


async def ask(channel: grpc.aio.Channel, method: str, request: dict[str, object]) -> Message:
    """Call any method by its full name, as a client does that has only the stubs."""
    service, _, name = method.partition("/")
    package, _, short = service.rpartition(".")
    stem = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", short).lower()
    module = importlib.import_module(f"{package}.{stem}_pb2")
    message = json_format.ParseDict(request, getattr(module, f"{name}Request")())
    stub = getattr(importlib.import_module(f"{package}.{stem}_pb2_grpc"), f"{short}Stub")(channel)
    if name != "Complete":
        return await getattr(stub, name)(message, timeout=WAIT_S)

    async def one() -> AsyncIterator[Message]:
        yield message

    async for response in getattr(stub, name)(one(), timeout=WAIT_S):
        return response
    raise AssertionError("no response")


@pytest.mark.requirement("API-1")
async def test_the_walk_of_the_page_trains_one_rollout(tmp_path: Path) -> None:
    known: dict[str, str] = {}
    async with running("processes", tmp_path) as mesh:
        for method, request in steps():
            name = method.split(".")[1]
            async with connect(mesh.configuration.addresses.of(name)) as channel:
                answer = await ask(channel, method, filled(request, known))
            if method.endswith("/OpenAttempt"):
                known["capture_key"] = answer.attempt.capture_key
            elif method.endswith("/Complete"):
                (result,) = answer.results
                known["id"] = json.loads(result.completion.response)["id"]
            elif method.endswith("/SealAttempt"):
                known["epoch"] = str(answer.attempt.epoch)
                known["revision"] = str(answer.attempt.revision)
            elif method.endswith("/FinalizeRollout"):
                assert not answer.receipt.masked, answer.receipt
        assert method.endswith("/FinalizeGroup")
        assert len(answer.row_ids) == 1
        assert not answer.drop_reason
        batch = await mesh.clients.finalizer().group("task-7")
        assert [receipt.rollout_id for receipt in batch.receipts] == ["task-7-r0"]
