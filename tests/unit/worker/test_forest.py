"""Calls of forest mode on the worker: it decides, and says what it decided."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import pytest

from callforest.capture.v1 import capture_admission_pb2 as admission_pb
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import staged_call_from_proto
from callforest_client.errors import UnavailableError
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.validation import check
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.chat_text import TURN_END, ChatMlTemplate
from callforest_mesh.worker.engine import EngineRefusalError, TokenIds
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.unit.worker.played_staging import CONTEXT, USER, PlayedStaging, behind, call_of

CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "3"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THOUGHT = "<think>hm</think>yes"


@dataclass(frozen=True)
class ReasonlessTemplate(ChatMlTemplate):
    """Leaves reasoning out of every answer but one that ends the conversation."""

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
    ) -> TokenIds:
        shown = [
            message
            if n == len(messages) - 1
            else {**message, "content": str(message["content"]).rpartition("</think>")[2]}
            for n, message in enumerate(messages)
        ]
        return super().render(shown, add_generation_prompt=add_generation_prompt)


@dataclass(frozen=True)
class LiteralTemplate(ChatMlTemplate):
    """Writes null as a word, and cannot do without the field."""

    absent_is_refused: bool = False

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
    ) -> TokenIds:
        if self.absent_is_refused and not all("content" in message for message in messages):
            raise EngineRefusalError("no content", parameter="content")
        shown = [{**message, "content": str(message.get("content", ""))} for message in messages]
        return super().render(shown, add_generation_prompt=add_generation_prompt)


def answering(*texts: str, template: ChatMlTemplate | None = None) -> ScriptedEngine:
    """Make an engine that answers with texts, in order, and ends its turns."""

    def script(_prompt: TokenIds, _call_id: str, ordinal: int) -> ScriptedTurn:
        sampled = [*texts[ordinal % len(texts)].encode(), TURN_END]
        return ScriptedTurn(sampled, [-0.5] * len(sampled))

    return ScriptedEngine(script=script, template=template or ChatMlTemplate())


async def forest(engine: ScriptedEngine) -> tuple[Calls, PlayedStaging, pb.GeneratedCall]:
    """Start a worker, and make a first call on it."""
    staging = PlayedStaging()
    await engine.start()
    calls = Calls(engine, staging, WorkerOptions("unused"))
    first = await calls.generate(CONTEXT, forest_call(USER, call_id="a"))
    return calls, staging, first


def forest_call(
    *messages: object,
    call_id: str = "b",
    after: pb.GeneratedCall | None = None,
    match: admission_pb.HistoryMatch.ValueType = admission_pb.HISTORY_MATCH_EXACT,
) -> pb.GenerateCall:
    position = None
    if after is not None:
        position = behind(after.staged)
        position.match = match
    call = call_of(*messages, call_id=call_id, position=position)
    call.admission.is_forest = True
    return call


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def prompts_of(engine: ScriptedEngine) -> list[list[int]]:
    return [prompt.token_ids.tolist() for prompt in engine.prompts]


@pytest.mark.requirement("ADM-5", "ADM-6")
async def test_a_proven_continuation_begins_with_the_captured_tokens() -> None:
    engine = answering("yes")
    calls, staging, first = await forest(engine)
    second = await calls.generate(CONTEXT, forest_call(USER, said("yes"), USER, after=first))
    captured = staged_call_from_proto(staging.calls[0]).token_ids.tolist()
    assert prompts_of(engine)[1][: len(captured)] == captured
    assert second.staged.parent_call_id == "a"
    check(second)
    decision = second.decision
    assert decision.input == admission_pb.CAPTURE_INPUT_SPLICED
    assert (decision.reason, list(decision.notes), len(decision.proof)) == ("", [], 32)
    assert decision.prefix_cut == len(captured) - 1


@pytest.mark.requirement("ADM-5")
async def test_a_root_says_that_it_is_one_and_chain_mode_says_nothing() -> None:
    calls, _, first = await forest(answering("yes"))
    assert first.decision == admission_pb.CaptureDecision(input=admission_pb.CAPTURE_INPUT_ROOT)
    check(first)
    chain = await calls.generate(CONTEXT, call_of(USER, call_id="b"))
    assert not chain.HasField("decision")
    assert not (await calls.measure(CONTEXT, call_of(USER))).HasField("decision")
    uncaptured = await calls.generate(CONTEXT, call_of(USER, captured=False))
    assert not uncaptured.HasField("decision")


@pytest.mark.requirement("CAP-13", "ADM-5")
@pytest.mark.parametrize("forest_winner", [True, False])
async def test_a_decision_is_staged_with_its_call_and_given_to_the_loser(
    forest_winner: bool,
) -> None:
    calls, staging, first = await forest(answering("yes"))
    second = await calls.generate(CONTEXT, forest_call(USER, said("yes"), USER, after=first))
    assert [call.decision for call in staging.calls] == [first.decision, second.decision]
    won = staging_pb.StagedWinner(served_response=b"{}", completion=first.completion)
    if forest_winner:
        won.decision.CopyFrom(second.decision)
    staging.receipt = staging_pb.StagedReceipt(coords=first.staged, winner=won)
    lost = await calls.generate(CONTEXT, forest_call(USER, call_id="a"))
    assert (lost.chat_response, lost.staged) == (b"{}", first.staged)
    assert lost.HasField("decision") is forest_winner
    assert lost.decision == won.decision


@pytest.mark.requirement("ADM-5")
async def test_what_cannot_be_placed_is_rendered_plainly_and_staged_as_a_root() -> None:
    engine = answering("yes")
    calls, staging, first = await forest(engine)
    history = [USER, said("yes"), USER, said("more"), USER]
    second = await calls.generate(CONTEXT, forest_call(*history, after=first))
    plain = engine.template.render(history, add_generation_prompt=True).tolist()
    assert prompts_of(engine)[1] == plain
    assert second.WhichOneof("capture") == "staged", second.failed
    staged = staged_call_from_proto(staging.calls[1])
    assert (staged.identity.parent_call_id, staged.prev_len) == (None, 0)
    assert staged.token_ids[: len(plain)].tolist() == plain
    decision = second.decision
    assert decision.input == admission_pb.CAPTURE_INPUT_ROOT
    assert (decision.reason, decision.proof) == ("turn_count_differs", b"")
    # What follows such a root continues it like any other.
    history += [said("yes"), USER]
    third = await calls.generate(CONTEXT, forest_call(*history, call_id="c", after=second))
    assert third.decision.input == admission_pb.CAPTURE_INPUT_SPLICED
    assert third.staged.parent_call_id == "b"


@pytest.mark.requirement("ADM-5")
async def test_chain_mode_still_fails_the_capture_there() -> None:
    calls, staging, first = await forest(answering("yes"))
    history = [USER, said("yes"), USER, said("more"), USER]
    call = call_of(*history, call_id="b", position=behind(first.staged))
    assert (await calls.generate(CONTEXT, call)).failed.reason == "prefix_mismatch"
    assert len(staging.calls) == 1


@pytest.mark.requirement("ADM-5")
async def test_tokens_that_cannot_be_had_are_no_reason_for_a_root() -> None:
    engine = answering("yes")
    _, _, first = await forest(engine)
    staging = PlayedStaging()
    staging.prefix = UnavailableError(
        grpc.StatusCode.UNAVAILABLE, "gone", reason=er.ERROR_REASON_PEER_UNAVAILABLE
    )
    elsewhere = Calls(engine, staging, WorkerOptions("unused"))
    call = forest_call(USER, said("yes"), USER, after=first)
    second = await elsewhere.generate(CONTEXT, call)
    assert second.failed.reason == "prefix_unavailable"
    assert second.chat_response
    assert not second.HasField("decision")
    assert not staging.calls
    measured = await elsewhere.measure(CONTEXT, call)
    assert measured.prompt_token_count == len(engine.prompts[-1].token_ids)
    assert not measured.HasField("decision")


@pytest.mark.requirement("ADM-4")
async def test_a_candidate_without_proof_is_refused_before_anything_is_done() -> None:
    engine = answering("yes")
    _, _, first = await forest(engine)
    staging = PlayedStaging()
    calls = Calls(engine, staging, WorkerOptions("unused"))
    call = forest_call(USER, said("yes"), USER, after=first, match=0)
    for ask in (calls.generate, calls.measure):
        with pytest.raises(Refusal) as refused:
            await ask(CONTEXT, call)
        assert refused.value.reason == er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF
        assert refused.value.facts == {"capture_key": "k", "call_id": "b"}
    assert (len(engine.prompts), staging.queries, staging.calls) == (1, [], [])


@pytest.mark.requirement("ADM-5")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize(
    ("template", "echoed", "equivalent"),
    [
        (ChatMlTemplate(), {}, True),
        (ChatMlTemplate(), {"content": None}, True),
        (ChatMlTemplate(), {"content": ""}, True),
        (LiteralTemplate(), {}, False),
        (LiteralTemplate(), {"content": None}, False),
        (LiteralTemplate(), {"content": ""}, False),
        (LiteralTemplate(absent_is_refused=True), {"content": ""}, False),
    ],
)
async def test_equivalence_is_proven_by_the_renderer_or_a_context_begins(
    template: ChatMlTemplate, echoed: dict[str, object], *, equivalent: bool
) -> None:
    engine = answering("calls", template=template)
    calls, _, first = await forest(engine)
    echo = {"role": "assistant", "tool_calls": [CALL], **echoed}
    match = admission_pb.HISTORY_MATCH_TOOL_CONTENT_EQUIVALENT
    call = forest_call(USER, echo, RESULT, after=first, match=match)
    decision = (await calls.generate(CONTEXT, call)).decision
    spliced = decision.input == admission_pb.CAPTURE_INPUT_SPLICED
    assert spliced == equivalent
    assert decision.reason == ("" if equivalent else "renderer_not_equivalent")
    assert list(decision.notes) == (["tool_content_equivalence"] if equivalent else [])


@pytest.mark.bugcase("B02")
@pytest.mark.requirement("ADM-5")
async def test_reasoning_that_the_template_drops_is_spliced_and_said() -> None:
    engine = answering(THOUGHT, template=ReasonlessTemplate())
    calls, staging, first = await forest(engine)
    second = await calls.generate(CONTEXT, forest_call(USER, said(THOUGHT), USER, after=first))
    assert second.decision.input == admission_pb.CAPTURE_INPUT_SPLICED
    assert list(second.decision.notes) == ["template_truncated_reasoning"]
    captured = staged_call_from_proto(staging.calls[0]).token_ids.tolist()
    assert prompts_of(engine)[1][: len(captured)] == captured
    assert second.staged.prev_token_count == len(captured)


@pytest.mark.bugcase("B05")
@pytest.mark.requirement("ADM-5")
async def test_a_tool_call_that_was_cleared_is_not_put_back() -> None:
    """Its history is nobody's, so the call comes as a root, though the tokens are at hand."""
    engine = answering("calls add")
    calls, staging, _ = await forest(engine)
    cleared = {"role": "assistant", "content": None, "tool_calls": None}
    second = await calls.generate(CONTEXT, forest_call(USER, cleared, RESULT))
    plain = engine.template.render([USER, cleared, RESULT], add_generation_prompt=True)
    assert prompts_of(engine)[1] == plain.tolist()
    assert b"calls add" not in bytes(one for one in prompts_of(engine)[1] if one < 256)
    assert second.decision == admission_pb.CaptureDecision(input=admission_pb.CAPTURE_INPUT_ROOT)
    assert not staging.calls[1].HasField("parent_call_id")


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
async def test_a_turn_that_was_cut_is_ended_by_the_template_without_loss() -> None:
    engine = ScriptedEngine(script=lambda *_: ScriptedTurn([*b"ye"], [-0.5, -0.5], "length"))
    calls, staging, first = await forest(engine)
    assert first.completion.finish_reason == "length"
    second = await calls.generate(CONTEXT, forest_call(USER, said("ye"), USER, after=first))
    staged = staged_call_from_proto(staging.calls[1])
    assert second.staged.parent_call_id == "a"
    assert staged.token_ids[0] == TURN_END
    # It is carried, not generated: without a log-probability, and without loss.
    assert len(staged.token_ids) - staged.carry_len == len(staged.logprobs) == 2


@pytest.mark.requirement("CAP-10")
@pytest.mark.parametrize(
    "history",
    [
        [USER, said("yes"), USER],
        [USER, said("yes"), USER, said("more"), USER],
        [USER, CALLED, RESULT],
    ],
)
async def test_a_measure_is_what_the_call_would_be_and_leaves_no_trace(
    history: list[object],
) -> None:
    engine = answering("yes")
    calls, staging, first = await forest(engine)
    call = forest_call(*history, after=first)
    before = (len(engine.prompts), len(staging.calls), len(staging.queries))
    measured = await calls.measure(CONTEXT, call)
    assert (len(engine.prompts), len(staging.calls), len(staging.queries)) == before
    check(measured)
    generated = await calls.generate(CONTEXT, call)
    assert measured.prompt_token_count == len(engine.prompts[-1].token_ids)
    assert measured.decision == generated.decision
    assert generated.HasField("staged")
    # The measure made no sample either: the script's next answer is the call's.
    assert json.loads(generated.chat_response)["usage"]["prompt_tokens"] == len(
        engine.prompts[-1].token_ids
    )


@pytest.mark.requirement("CAP-10")
async def test_a_measure_is_refused_as_the_call_would_be() -> None:
    engine = ScriptedEngine(ScriptedOptions(context_token_count=16))
    await engine.start()
    calls = Calls(engine, PlayedStaging(), WorkerOptions("unused"))
    reasons = []
    for ask in (calls.measure, calls.generate):
        with pytest.raises(Refusal) as refused:
            await ask(CONTEXT, forest_call(USER))
        reasons.append((refused.value.reason, refused.value.message))
    assert reasons[0] == reasons[1]
    await engine.stop()
    with pytest.raises(Refusal) as refused:
        await calls.measure(CONTEXT, forest_call(USER))
    assert refused.value.reason == er.ERROR_REASON_ENGINE_UNAVAILABLE


@pytest.mark.requirement("CAP-11")
async def test_another_configuration_is_refused_before_generation() -> None:
    engine = answering("yes")
    calls, staging, _ = await forest(engine)
    bound = engine.describe().configuration_digest
    call = forest_call(USER)
    call.configuration_digest = bound
    await calls.measure(CONTEXT, call)
    assert (await calls.generate(CONTEXT, call)).HasField("staged")
    # The engine starts anew with another template.
    await engine.stop()
    engine.template = ReasonlessTemplate()
    await engine.start()
    for ask in (calls.generate, calls.measure):
        with pytest.raises(Refusal) as refused:
            await ask(CONTEXT, call)
        assert refused.value.reason == er.ERROR_REASON_CONFIGURATION_CHANGED
        actual = engine.describe().configuration_digest
        assert refused.value.facts == {
            "capture_key": "k",
            "expected": bound.hex(),
            "actual": actual.hex(),
        }
    assert (len(engine.prompts), len(staging.calls)) == (2, 2)


@pytest.mark.requirement("CAP-11")
async def test_the_scripted_engine_s_digest_covers_what_it_renders_with() -> None:
    engines = [
        ScriptedEngine(),
        ScriptedEngine(options=replace(ScriptedOptions(), model="other")),
        ScriptedEngine(template=ReasonlessTemplate()),
        ScriptedEngine(template=LiteralTemplate()),
        ScriptedEngine(template=LiteralTemplate(absent_is_refused=True)),
    ]
    digests = set()
    for engine in [*engines, ScriptedEngine()]:
        digests.add((await engine.start()).configuration_digest)
    assert len(digests) == len(engines)


@pytest.mark.requirement("CAP-11")
async def test_the_scripted_engine_describes_what_it_is_now() -> None:
    engine = ScriptedEngine()
    begun = await engine.start()
    assert engine.describe() == begun
    await engine.update_weights("", 7)
    assert engine.describe() == replace(begun, weight_version=7)
    engine.template = ReasonlessTemplate()
    assert engine.describe().configuration_digest != begun.configuration_digest
    engine.template = ChatMlTemplate()
    assert engine.describe() == replace(begun, weight_version=7)


@pytest.mark.requirement("ADM-5")
async def test_the_scripted_engine_s_terminators_are_its_template_s() -> None:
    """A turn that ends otherwise than the template's turns do is no proven boundary."""
    template = ChatMlTemplate(terminators=frozenset({TURN_END, 258}))
    engine = ScriptedEngine(
        script=lambda *_: ScriptedTurn([*b"yes", 258], [-0.5] * 4), template=template
    )
    calls, _, first = await forest(engine)
    second = await calls.generate(CONTEXT, forest_call(USER, said("yes"), USER, after=first))
    assert second.decision.reason == "terminator_differs"
