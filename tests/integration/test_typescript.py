"""A harness in another language: TypeScript over gRPC, from the generated stubs."""

import asyncio
import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import openai
import pytest
from google.protobuf import json_format
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, staged_call_pb2
from callforest_client.codec import call_record_from_proto, staged_call_from_proto
from callforest_client.rollout import Outcome
from callforest_core.custody.call import Receipt
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import verify_and_linearize
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration
from tests.integration.running_mesh import Running, free_port, running

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CLIENT = ROOT / "clients/typescript"
HARNESS = CLIENT / "dist/clients/typescript/examples/rollout.js"
SPOKEN_TO = ("admission", "ledger", "gateway", "finalizer")
GRPC_MESSAGE_BYTES = 4 << 20
WAIT_S = 120.0
TURNS = 4
RULES = "Walk. A word of even length is a step east, any other a step west."
GOAL = 3
EACH_KIND = pytest.mark.parametrize("kind", ["embedded", "processes"])


def ran_to_end(*command: str) -> tuple[int, str]:
    """Run a command in the client's folder; give its status and all that it wrote."""
    ran = subprocess.run(
        command,
        cwd=CLIENT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    return ran.returncode, ran.stdout


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    status, written = ran_to_end("npm", "run", "--silent", "build")
    assert status == 0, written


def test_the_client_holds_against_a_server_of_its_own() -> None:
    tests = sorted(str(file) for file in HARNESS.parents[1].glob("test/*.test.js"))
    assert len(tests) >= 4
    status, written = ran_to_end("node", "--test", *tests)
    assert status == 0, written
    passed = re.search(r"^. pass (\d+)$", written, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= 50


async def harness(mesh: Running, **options: object) -> tuple[int, str, str]:
    """Run the TypeScript harness; give its status and what it wrote."""
    addresses = mesh.configuration.addresses
    words = [f"--{name}={addresses.of(name)}" for name in SPOKEN_TO]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    child = await asyncio.create_subprocess_exec(
        "node", str(HARNESS), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def rolled_out(mesh: Running, rollout_id: str, **options: object) -> receipt_pb2.Receipt:
    """Have the TypeScript harness run a rollout; give the receipt that it printed."""
    status, out, err = await harness(mesh, rollout=rollout_id, **options)
    assert status == 0, err
    return json_format.Parse(out, receipt_pb2.Receipt())


@dataclass(frozen=True)
class Served:
    """An answer: its name, its text, and its turn as the harness puts it into the history."""

    response_id: str
    text: str
    turn: list[dict[str, object]]


Way: TypeAlias = Callable[[openai.AsyncOpenAI, list[dict[str, object]], int], Awaitable[Served]]


def read_chat(answer: ChatCompletion) -> Served:
    text = answer.choices[0].message.content or ""
    return Served(answer.id, text, [{"role": "assistant", "content": text}])


def read_response(answer: Response) -> Served:
    """Echo the output items as the SDK gave them."""
    turn = [item.model_dump(exclude_none=True) for item in answer.output]
    return Served(answer.id, answer.output_text, turn)


async def chat(sdk: openai.AsyncOpenAI, turns: list[dict[str, object]], seed: int) -> Served:
    asked = {"model": "any", "messages": turns, "seed": seed, "max_completion_tokens": 32}
    return read_chat(await sdk.chat.completions.create(**asked))


async def chat_events(sdk: openai.AsyncOpenAI, turns: list[dict[str, object]], seed: int) -> Served:
    asked = {"model": "any", "messages": turns, "seed": seed, "max_completion_tokens": 32}
    async with sdk.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        return read_chat(stream.current_completion_snapshot)


async def responses(sdk: openai.AsyncOpenAI, turns: list[dict[str, object]], seed: int) -> Served:
    asked = {"model": "any", "input": turns, "max_output_tokens": 32}
    return read_response(await sdk.responses.create(**asked, extra_body={"seed": seed}))


async def responses_events(
    sdk: openai.AsyncOpenAI, turns: list[dict[str, object]], seed: int
) -> Served:
    asked = {"model": "any", "input": turns, "max_output_tokens": 32}
    async with sdk.responses.stream(**asked, extra_body={"seed": seed}) as stream:
        events = [event async for event in stream]
    return read_response(events[-1].response)


WAYS: dict[str, Way] = {
    "chat": chat,
    "chat-events": chat_events,
    "responses": responses,
    "responses-events": responses_events,
}


async def walk(mesh: Running, way: str, *, group_id: str, slot: int) -> receipt_pb2.Receipt:
    """Play the same game in Python, over HTTP with the unmodified SDK."""
    rollout = await mesh.owner.open(way)
    turns: list[dict[str, object]] = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "You stand at 0. Go."},
    ]
    position = 0
    response_id = ""
    async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key="any", max_retries=0) as sdk:
        for turn in range(TURNS):
            if abs(position) >= GOAL:
                break
            served = await WAYS[way](sdk, turns, turn)
            response_id = served.response_id
            words = served.text.split(" ")
            position += sum(1 if len(word) % 2 == 0 else -1 for word in words if word)
            turns += [*served.turn, {"role": "user", "content": f"You stand at {position}. Go on."}]
    outcome = Outcome(reward=abs(position) / GOAL, declared_response_id=response_id)
    return await mesh.owner.finish(rollout, outcome, group_id=group_id, slot=slot)


def readme_example() -> str:
    """Give the one block of TypeScript in the README."""
    (block,) = re.findall(r"^```ts\n(.+?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return block


def compiled_apart(source: str) -> Path:
    """Compile a file of the package's user by the package's own rules; give what to run."""
    folder = CLIENT / "dist/readme"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "example.ts").write_text(source)
    options = {"incremental": False, "tsBuildInfoFile": None, "outDir": "out"}
    rules = {"extends": "../../tsconfig.json", "compilerOptions": options, "files": ["example.ts"]}
    (folder / "tsconfig.json").write_text(json.dumps({**rules, "include": []}))
    status, written = ran_to_end("npx", "--no-install", "tsc", "--project", str(folder))
    assert status == 0, written
    return folder / "out/clients/typescript/dist/readme/example.js"


async def test_the_readme_s_example_compiles_runs_and_ends(tmp_path: Path) -> None:
    program = compiled_apart(readme_example())
    async with running("embedded", tmp_path) as mesh:
        text, known = program.read_text(), MeshConfiguration().addresses
        for name in SPOKEN_TO:
            assert text.count(f'"{known.of(name)}"') == 1, name
            text = text.replace(known.of(name), mesh.configuration.addresses.of(name))
        program.write_text(text)
        status, written = await asyncio.to_thread(ran_to_end, "node", str(program))
    assert (status, written) == (0, "false \n")


async def verified_row(mesh: Running, receipt: receipt_pb2.Receipt) -> LinearizedRow:
    """Read a rollout back from the stores, verify it, and join its path."""
    key = receipt.capture_key
    manifest = await mesh.clients.ledger().manifest(key)
    records = [call_record_from_proto(record) for record in manifest.records]
    calls = await mesh.clients.staging().fetch(key, [record.call_id for record in records])
    of = Receipt(
        capture_key=key,
        manifest=tuple(records),
        terminal_call_id=receipt.terminal_call_id,
        capture_poisoned=bool(manifest.failures),
        terminal_selection=receipt.terminal_selection,
    )
    return verify_and_linearize(of, [staged_call_from_proto(call) for call in calls])


async def published(mesh: Running, group_id: str, rollouts: int) -> group_batch_pb2.GroupBatch:
    """Publish a group and receive it as the trainer would."""
    await mesh.owner.publish(group_id, rollouts)
    subscription = mesh.clients.finalizer().subscribe("trainer")
    try:
        await subscription.credit(1)
        async with asyncio.timeout(WAIT_S):
            return await anext(aiter(subscription))
    finally:
        await subscription.close()


def without_ids(segment: staged_call_pb2.StagedCall) -> bytes:
    """Give a published call's bytes without its names, and without the digest over them."""
    nameless = staged_call_pb2.StagedCall()
    nameless.CopyFrom(segment)
    for name in ("capture_key", "call_id", "parent_call_id", "digest"):
        nameless.ClearField(name)
    return nameless.SerializeToString(deterministic=True)


@pytest.mark.requirement("API-4", "CAP-1", "CAP-2")
@EACH_KIND
async def test_a_typescript_harness_trains_on_the_same_rows_as_every_way_of_the_sdk(
    kind: str, tmp_path: Path
) -> None:
    ports = [f"addresses.{name}=127.0.0.1:{free_port()}" for name in SERVICES]
    async with running(kind, tmp_path, *ports) as mesh:
        theirs = await rolled_out(mesh, "typescript", group="g", slot=0, turns=TURNS)
        assert not theirs.masked, theirs
        assert await mesh.clients.finalizer().receipt("typescript") == theirs
        assert theirs.terminal_selection == "declared"
        their_row = await verified_row(mesh, theirs)
        assert len(their_row.links) > 1
        assert their_row.token_mask.sum() == theirs.generated_token_count
        for slot, way in enumerate(WAYS, start=1):
            ours = await walk(mesh, way, group_id="g", slot=slot)
            assert not ours.masked, (way, ours)
            assert (theirs.reward, theirs.truncated) == (ours.reward, ours.truncated)
            our_row = await verified_row(mesh, ours)
            for column in ("token_ids", "token_mask", "logprobs"):
                assert getattr(their_row, column).tobytes() == getattr(our_row, column).tobytes()
        batch = await published(mesh, "g", 1 + len(WAYS))
    assert {row.kind for row in batch.rows} == {group_batch_pb2.ROW_KIND_TRAINING}
    rows = [
        [(without_ids(batch.segments[span.segment_index]), span.owns_loss) for span in row.spans]
        for row in batch.rows
    ]
    assert len(rows) == 1 + len(WAYS)
    assert all(row == rows[0] for row in rows)
    assert len(rows[0]) == len(their_row.links)


@pytest.mark.requirement("API-4")
@EACH_KIND
async def test_a_long_history_travels_from_typescript_with_default_limits(
    kind: str, tmp_path: Path
) -> None:
    more = "worker.scripted.context_token_count=8000000"
    async with running(kind, tmp_path, more) as mesh:
        size = GRPC_MESSAGE_BYTES + 100_000
        receipt = await rolled_out(mesh, "long", turns=2, history_bytes=size)
        assert not receipt.masked, receipt
        assert len(receipt.calls) == 2
        row = await verified_row(mesh, receipt)
    assert len(row.token_ids) == receipt.total_token_count > GRPC_MESSAGE_BYTES // 2


@EACH_KIND
async def test_a_refusal_reaches_typescript_with_its_reason(kind: str, tmp_path: Path) -> None:
    async with running(kind, tmp_path) as mesh:
        status, out, err = await harness(mesh, rollout="named-like-an-attempt-a1")
        assert (status, out) == (1, "")
        assert err.startswith("InvalidArgument INVALID_MESSAGE: "), err
        status, out, err = await harness(mesh, rollout="r1", tenant="stranger")
        assert (status, out) == (1, "")
        assert err.startswith("NotFound ATTEMPT_NOT_FOUND: "), err
        assert "capture_key=r1" in err
