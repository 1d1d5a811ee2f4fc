"""Chaos in forest mode finds wrong parents, calls and selections: each is put into a run."""

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest_client.ledger import Manifest
from callforest_client.rollout import OpenRollout
from callforest_core.forest.history import read_history
from callforest_mesh.gateway import asked
from tests.robustness.chaos_edges import HistoryRequiredError, Question, Said
from tests.robustness.chaos_load import opening
from tests.robustness.forest_account import (
    Account,
    AskedCall,
    Chosen,
    call_id_of,
    history_of,
    told,
)
from tests.robustness.forest_judge import (
    check_forest_parents,
    check_requests,
    check_selections,
    mask_of,
)
from tests.robustness.forest_load import EVENTS, GRPC, TURNS, ForestHarness, returned
from tests.robustness.history import History, ServedCall, check_calls
from tests.unit.ledger.calls import failure, record, said, user

KEY = "g-r1"
START = [user("begin")]
ONCE = [*START, said("A1"), user("go on")]
TWICE = [*ONCE, said("A2"), user("go on")]
COMPACTED = [*START, said("A2"), user("go on")]
OLDER = [*START, said("A1"), user("otherwise")]
SUMMED = [*START, user("two answers")]
CONVERSATIONS = {
    "c1": (START, "A1", ""),
    "c2x": (ONCE, "no", "c1"),
    "c2": (ONCE, "A2", "c1"),
    "c3": (TWICE, "A3", "c2"),
    "c4": (COMPACTED, "A4", ""),
    "c5": (OLDER, "A5", "c1"),
    "c6": (SUMMED, "A6", ""),
}
"""What is asked, what is answered, and what that continues."""


def answer(call_id: str, text: str, context: str = "") -> Said:
    return Said(call_id, f"chatcmpl-{call_id}", text, b"", context)


def account() -> Account:
    calls = []
    for call_id, (messages, text, parent) in CONVERSATIONS.items():
        context = "continuation" if parent else "root"
        one = AskedCall(
            call_id, history_of(messages), said=answer(call_id, text, context), accepted=True
        )
        one.ends = told([*messages, said(text)])
        one.accepted = call_id != "c2x"
        calls.append(one)
    return Account(KEY, calls)


def manifest(**parents: str) -> Manifest:
    """Give the ledger's rows of the attempt, some calls with another parent than theirs."""
    rows = []
    for call_id, (messages, text, parent) in CONVERSATIONS.items():
        made = record(call_id, messages, text, key=KEY)
        made.replay.item_count = len(messages) + 1
        if before := parents.get(call_id, parent):
            made.coords.parent_call_id = before
        rows.append(attempt_pb2.ManifestEntry(record=made))
    return Manifest(
        attempt_pb2.Attempt(capture_key=KEY, mode=attempt_pb2.CAPTURE_MODE_FOREST), tuple(rows)
    )


def wrong_parents(now: Manifest, asking: Account | None = None) -> list[str]:
    return check_forest_parents({KEY: asking or account()}, {KEY: now})


def requests(now: Manifest, asking: Account | None = None) -> list[str]:
    return check_requests({KEY: asking or account()}, {KEY: now}).all()


def without(now: Manifest, *call_ids: str) -> Manifest:
    kept = [one for one in now.entries if one.record.coords.call_id not in call_ids]
    return Manifest(now.attempt, tuple(kept))


def with_failure(now: Manifest, call_id: str, reason: str = "worker_capture_failed") -> Manifest:
    row = attempt_pb2.ManifestEntry(failure=failure(call_id, reason))
    return Manifest(now.attempt, (*now.entries, row))


def test_an_honest_run_has_no_faults() -> None:
    assert wrong_parents(manifest()) == []
    assert requests(manifest()) == []


@pytest.mark.parametrize(
    ("call_id", "parent"),
    [
        pytest.param("c3", "", id="a silent root"),
        pytest.param("c3", "c2x", id="the rejected sibling"),
        pytest.param("c2x", "c2", id="what was asked later"),
        pytest.param("c4", "c2", id="a compacted history is no call's"),
        pytest.param("c5", "c2", id="the newest instead of the older call"),
        pytest.param("c6", "c1", id="no answer is shown"),
    ],
)
def test_a_wrong_parent_is_found(call_id: str, parent: str) -> None:
    [found] = wrong_parents(manifest(**{call_id: parent}))
    wanted = CONVERSATIONS[call_id][2] or "nothing"
    assert found == f"{KEY}/{call_id} continues {parent or 'nothing'}, not {wanted}"


def test_of_calls_that_said_the_same_the_one_that_is_meant_is_continued() -> None:
    asking = account()
    again = AskedCall("c2y", asking.asked[2].history, "c1", said=answer("c2y", "A2"))
    again.ends = asking.asked[2].ends
    asking.asked.insert(2, again)
    asking.asked[4].meant = "c2y"
    row = attempt_pb2.ManifestEntry(record=record("c2y", ONCE, "A2", key=KEY))
    row.record.coords.parent_call_id = "c1"
    row.record.replay.item_count = 4
    now = manifest(c3="c2y")
    both = Manifest(now.attempt, (row, *now.entries))
    assert wrong_parents(both, asking) == []
    asking.asked[4].meant = "c2"
    assert wrong_parents(both, asking) == [f"{KEY}/c3 continues c2y, not c2"]
    asking.asked[4].meant = "c9"
    assert wrong_parents(both, asking) == [], "it was not named: either is"


def test_what_has_no_record_or_names_no_history_is_not_continued() -> None:
    assert wrong_parents(without(manifest(c3=""), "c2")) == []
    unnamed = manifest(c3="")
    unnamed.records[2].ClearField("replay")
    assert wrong_parents(unnamed) == []
    unnamed = manifest()
    unnamed.records[2].ClearField("replay")
    assert len(wrong_parents(unnamed)) == 1


def test_a_history_that_was_lost_is_found_but_of_a_delta() -> None:
    unnamed, asking = manifest(c3=""), account()
    unnamed.records[2].ClearField("replay")
    assert f"lost: the history of {KEY}/c2" in requests(unnamed, asking)
    asking.asked[2].is_delta = True
    asking.asked[3].said = answer("c3", "A3", "root")
    assert requests(unnamed, asking) == []


def test_what_a_harness_was_told_of_its_context_is_held_against_the_record() -> None:
    asking = account()
    asking.asked[2].said = answer("c2", "A2", "root")
    asking.asked[4].said = answer("c4", "A4")
    assert requests(manifest(), asking) == [f"changed: what {KEY}/c2 was told of its context: root"]


def test_a_record_that_nobody_asked_for_is_found() -> None:
    asking = account()
    del asking.asked[1]
    assert requests(manifest(), asking) == [f"duplicated: {KEY}/c2x: nobody asked for it"]


def test_an_answer_under_another_name_is_found() -> None:
    asking = account()
    asking.asked[0].said = answer("c9", "A1", "root")
    assert requests(manifest(), asking) == [f"changed: the name of {KEY}/c1: c9"]


def test_a_failure_stands_for_a_request_that_was_given_up_and_for_no_other() -> None:
    failed, asking = with_failure(without(manifest(), "c6"), "c6"), account()
    [found] = requests(failed, asking)
    assert found.startswith(f"lost: the capture of {KEY}/c6: worker_capture_failed")
    asking.asked[-1].given_up = True
    assert requests(failed, asking) == []
    assert requests(with_failure(manifest(), "c6"), account()) == [], "kept beside its record"
    assert len(requests(with_failure(manifest(), "c9"), account())) == 1


def test_a_call_that_stays_pending_was_given_up() -> None:
    waiting, asking = without(manifest(), "c6"), account()
    waiting.attempt.pending_call_ids.append("c6")
    assert requests(waiting, asking) == [f"lost: the capture of {KEY}/c6: pending"]
    asking.asked[-1].given_up = True
    assert requests(waiting, asking) == []


def test_a_served_call_keeps_its_record_beside_a_failure_in_forest_mode_alone() -> None:
    served = ServedCall(KEY, "c6", "chatcmpl-c6", b"")
    both = with_failure(manifest(), "c6")
    assert check_calls(History(served=[served]), {KEY: both}).all() == []
    both.attempt.mode = attempt_pb2.CAPTURE_MODE_CHAIN
    assert len(check_calls(History(served=[served]), {KEY: both}).changed) == 1
    lost = without(manifest(), "c6")
    assert len(check_calls(History(served=[served]), {KEY: lost}).lost) == 1


def test_a_call_is_named_by_its_key() -> None:
    assert call_id_of("r1", "key-1") == asked.call_id_of("r1", "key-1")
    assert call_id_of("r1", "key-1") != call_id_of("r1", "key-2")


SELECTED = ("c1", "c2", "c3", "c4", "c5", "c6")


def receipt(*call_ids: str, policy: str = "explicit", mask: str = "") -> receipt_pb2.Receipt:
    made = receipt_pb2.Receipt(
        rollout_id="r1",
        capture_key=KEY,
        masked=bool(mask),
        mask_reason=mask,
        selection_policy=policy,
        selected_call_ids=call_ids,
        terminal_call_id="c6",
    )
    for call_id, (_, _, parent) in CONVERSATIONS.items():
        call = made.calls.add(call_id=call_id, selected=call_id in call_ids and not mask)
        if parent:
            call.parent_call_id = parent
    return made


def selections(
    made: receipt_pb2.Receipt,
    *call_ids: str,
    policy: str = "explicit",
    now: Manifest | None = None,
) -> list[str]:
    chosen = Chosen(KEY, policy, call_ids or None, "c6")
    return check_selections({"r1": chosen}, {"r1": made}, {KEY: now or manifest()}).all()


def test_what_was_selected_is_what_the_evidence_says() -> None:
    assert selections(receipt(*SELECTED), *SELECTED) == []
    every = receipt(*CONVERSATIONS, policy="all_captured")
    assert selections(every, policy="all_captured") == []
    another_order = receipt("c6", "c4", "c1", "c5", "c2", "c2x", "c3", policy="all_captured")
    assert selections(another_order, policy="all_captured") == []


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (receipt("c1", "c2", "c3", "c4", "c6"), "not ["),
        (receipt(*CONVERSATIONS), "not ["),
        (receipt("c1", "c2", "c3", "c5", "c4", "c6"), "another order"),
        (receipt(*SELECTED, policy="returned_history"), "returned_history, not explicit"),
        (receipt(*SELECTED, mask="capture_poisoned"), "masked for capture_poisoned, not nothing"),
    ],
)
def test_another_selection_is_found(made: receipt_pb2.Receipt, fault: str) -> None:
    [found] = selections(made, *SELECTED)
    assert fault in found


def spoil_flag(made: receipt_pb2.Receipt) -> None:
    made.calls[2].selected = False


def spoil_parent(made: receipt_pb2.Receipt) -> None:
    made.calls[3].ClearField("parent_call_id")


def spoil_terminal(made: receipt_pb2.Receipt) -> None:
    made.terminal_call_id = "c5"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (spoil_flag, "train, not"),
        (spoil_parent, "its parents are not the ledger's"),
        (spoil_terminal, "c5 is scored, not c6"),
    ],
)
def test_a_receipt_that_contradicts_itself_is_found(
    spoil: Callable[[receipt_pb2.Receipt], None], fault: str
) -> None:
    made = receipt(*SELECTED)
    spoil(made)
    [found] = selections(made, *SELECTED)
    assert fault in found


def test_everything_captured_is_every_record_with_parents_first() -> None:
    some = receipt(*SELECTED, policy="all_captured")
    assert "not [" in selections(some, policy="all_captured")[0]
    early = receipt("c3", "c1", "c2x", "c2", "c4", "c5", "c6", policy="all_captured")
    assert "['c3'] stand before" in selections(early, policy="all_captured")[0]


def test_a_rollout_is_masked_for_what_its_attempt_shows() -> None:
    poisoned = with_failure(manifest(), "c9")
    assert mask_of(poisoned) == "capture_poisoned"
    masked = receipt(*SELECTED, mask="capture_poisoned")
    assert selections(masked, *SELECTED, now=poisoned) == []
    [found] = selections(receipt(*SELECTED), *SELECTED, now=poisoned)
    assert found == "changed: r1 is masked for nothing, not capture_poisoned"
    masked.calls[0].selected = True
    assert "are selected" in selections(masked, *SELECTED, now=poisoned)[0]
    waiting = manifest()
    waiting.attempt.pending_call_ids.append("c9")
    assert mask_of(waiting) == "pending_call"
    open_ended = receipt(*SELECTED, mask="selection_not_closed")
    assert selections(open_ended, *SELECTED, now=manifest(c3="c2x")) == [
        "changed: the selection of r1: its parents are not the ledger's"
    ]
    open_ended.calls[3].parent_call_id = "c2x"
    assert selections(open_ended, *SELECTED, now=manifest(c3="c2x")) == []
    beside = with_failure(manifest(), "c6", "request_finished_without_staged_coordinates")
    assert mask_of(beside) == ""
    assert check_selections({"r1": Chosen(KEY, "explicit", SELECTED, "c6")}, {}, {}).lost


@pytest.mark.parametrize("with_references", [False, True])
def test_what_a_harness_returns_shows_what_it_accepted(with_references: bool) -> None:
    history = read_history(json.loads(returned(account(), with_references=with_references)))
    [shown] = history.accounts
    ids = [passage.response_id for passage in shown.passages]
    assert ids == [f"chatcmpl-{call_id}" for call_id in SELECTED]
    named = None if history.references is None else [one.names for one in history.references]
    assert named == ([(one,) for one in ids] if with_references else None)


class Played:
    """Stands for a load: answers every question at once, and keeps them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.questions: list[Question] = []

    async def keyed(self, ask: Callable[[str], Awaitable[Said]], key: str) -> Said:
        return await ask(key)

    async def edge(self, rollout: OpenRollout, question: Question, key: str) -> Said:
        self.questions.append(question)
        if question.sent and len(self.questions) % 3 == 0:
            raise HistoryRequiredError("not kept")
        call_id = call_id_of(rollout.capture_key, key)
        return answer(call_id, f"{question.seed} to {told(question.messages).hex()}")

    def note(self, _: OpenRollout, said: Said) -> None:
        assert said.call_id


@pytest.mark.parametrize("slot", [0, 1, 2])
async def test_a_claim_is_of_the_call_whose_history_is_shown(slot: int) -> None:
    deeds: Counter[str] = Counter()
    for number in range(60):
        name = f"g{number}-r{slot}"
        attempt = attempt_pb2.Attempt(capture_key=name, attempt_number=1)
        played, kept = Played(), Account(name)
        rollout = OpenRollout(name, attempt, "")
        harness = ForestHarness(played, rollout, kept, played.edge, opening("g"))
        await harness.play()
        ends = {one.call_id: one.ends for one in kept.answered}
        assert len(kept.accepted) == TURNS
        for one, question in zip(kept.asked, played.questions, strict=True):
            assert question.claim == "" or ends[question.claim] == one.history
            assert one.given_up or one.said is not None
            claims = bool(question.claim)
            assert claims <= (slot != EVENTS), "there ids say it"
            if one.history in ends.values() and slot != EVENTS:
                assert claims, "what is known is claimed"
        deeds += played.counts
    assert (deeds["deltas"] > 0) == (slot == GRPC)
    assert {"compacted to middle", "compacted to older", "compacted to summary"} <= deeds.keys()


def test_ids_that_are_echoed_do_not_make_another_conversation() -> None:
    echoed = [{**one, "id": random.random()} for one in TWICE]
    assert told(echoed) == told(TWICE)
    assert history_of(echoed) == told(TWICE[:-1])
    assert history_of(START) == b""
