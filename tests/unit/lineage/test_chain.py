"""The chain-mode ledger view: rows, verdicts, poison."""

import random
from collections.abc import Callable

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.chain import (
    CallFailure,
    ChainProbe,
    ChainView,
    ContextWitness,
    Match,
    ProbeError,
    Root,
    RowConflictError,
    Unresolved,
    UnresolvedReason,
)
from callforest_core.lineage.fingerprint import UnreadableItemError

MakeRecord = Callable[..., CallRecord]
MakeProbe = Callable[[list[object]], ChainProbe]
MakeWitness = Callable[[list[object], list[object]], ContextWitness]

SYSTEM: dict[str, object] = {"role": "system", "content": "be brief"}


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def called(call_id: str) -> dict[str, object]:
    call = {"id": call_id, "function": {"name": "run", "arguments": "{}"}}
    return {"role": "assistant", "content": "ok", "tool_calls": [call]}


FIRST: list[object] = [SYSTEM, user("one")]
SECOND: list[object] = [*FIRST, said("A"), user("two")]
THIRD: list[object] = [*SECOND, said("B"), user("three")]


@pytest.fixture
def chain(make_record: MakeRecord, witness: MakeWitness) -> ChainView:
    """A root `a` that answered A and its continuation `b` that answered B."""
    view = ChainView()
    root = make_record("a")
    view.append_record(root, witness(FIRST, [said("A")]))
    view.append_record(make_record("b", root), witness(SECOND, [said("B")]))
    return view


@pytest.mark.requirement("ADM-1")
def test_no_model_text_is_a_root_at_any_time(chain: ChainView, probe: MakeProbe) -> None:
    for view in (ChainView(), chain):
        assert view.resolve(probe([])) == Root(seeded=False)
        assert view.resolve(probe([SYSTEM, user("fresh")])) == Root(seeded=False)


@pytest.mark.requirement("ADM-1")
def test_unmatched_history_is_a_root_only_while_the_attempt_has_no_rows(
    make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe
) -> None:
    seeded = probe([user("x"), said("seed"), user("y")])
    view = ChainView()
    assert view.resolve(seeded) == Root(seeded=True)
    committed, failed = ChainView(), ChainView()
    committed.append_record(make_record("a"), witness(FIRST, [said("A")]))
    failed.append_failure("a", "worker_capture_failed")
    for view in (committed, failed):
        assert view.resolve(seeded) == Unresolved(UnresolvedReason.NO_MATCH, ())


@pytest.mark.requirement("ADM-1")
def test_a_faithful_continuation_matches_with_length_hash_and_chain(
    chain: ChainView, probe: MakeProbe, make_record: MakeRecord
) -> None:
    root = make_record("a")
    assert chain.resolve(probe(SECOND)) == Match("a", root.cum_len, root.chain_hash)
    child = make_record("b", root)
    assert chain.resolve(probe(THIRD)) == Match("b", child.cum_len, child.chain_hash)
    assert chain.staging_chain("b") == ("attempt/a", "attempt/b")


@pytest.mark.requirement("ADM-1")
@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([*FIRST, said("A!"), user("two")], UnresolvedReason.NO_MATCH),
        ([user("one"), said("B"), user("two")], UnresolvedReason.NO_MATCH),
        ([*SECOND, said("B"), said("B")], UnresolvedReason.NO_MATCH),
        ([SYSTEM, user("uno"), said("A"), user("two")], UnresolvedReason.CONTEXT_CHANGED),
        ([said("A")], UnresolvedReason.CONTEXT_CHANGED),
    ],
    ids=["edited answer", "dropped answer", "repeated answer", "edited context", "no context"],
)
def test_what_does_not_match_is_never_a_root(
    chain: ChainView, probe: MakeProbe, items: list[object], reason: UnresolvedReason
) -> None:
    verdict = chain.resolve(probe(items))
    assert isinstance(verdict, Unresolved)
    assert verdict.reason is reason


@pytest.mark.requirement("ADM-1")
def test_an_item_inserted_behind_the_context_still_matches(
    chain: ChainView, probe: MakeProbe
) -> None:
    verdict = chain.resolve(probe([*FIRST, user("by the way"), said("A"), user("two")]))
    assert isinstance(verdict, Match)
    assert verdict.parent_call_id == "a"


@pytest.mark.requirement("ADM-1")
@pytest.mark.bugcase("B15")
def test_identical_text_from_two_siblings_names_both_and_admits_neither(
    chain: ChainView, make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe
) -> None:
    root = make_record("a")
    for call_id in ("first", "second"):
        chain.append_record(make_record(call_id, root), witness(SECOND, [said("ok")]))
    verdict = chain.resolve(probe([*SECOND, said("ok"), user("three")]))
    assert verdict == Unresolved(UnresolvedReason.AMBIGUOUS, ("first", "second"))
    assert isinstance(chain.resolve(probe(THIRD)), Match)  # the sound branch is not touched


@pytest.mark.bugcase("B15")
def test_an_echoed_tool_call_id_tells_the_siblings_apart(
    chain: ChainView, make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe
) -> None:
    root = make_record("a")
    for call_id in ("first", "second"):
        chain.append_record(make_record(call_id, root), witness(SECOND, [called(call_id)]))
    for call_id in ("first", "second"):
        verdict = chain.resolve(probe([*SECOND, called(call_id), user("three")]))
        assert isinstance(verdict, Match)
        assert verdict.parent_call_id == call_id


def test_one_answer_under_two_contexts_is_ambiguous_as_in_the_file_ledger(
    make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe
) -> None:
    view = ChainView()
    view.append_record(make_record("x"), witness([user("1")], [said("ok")]))
    view.append_record(make_record("y"), witness([user("2")], [said("ok")]))
    verdict = view.resolve(probe([user("1"), said("ok"), user("next")]))
    assert verdict == Unresolved(UnresolvedReason.AMBIGUOUS, ("x", "y"))


@pytest.mark.parametrize("version", [0, 1, 3])
def test_rows_of_another_fingerprint_version_are_no_parents(
    make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe, version: int
) -> None:
    view = ChainView()
    row = witness(FIRST, [said("A")])
    view.append_record(make_record("a", fingerprint_version=version), row)
    assert view.resolve(probe(SECOND)) == Unresolved(UnresolvedReason.NO_MATCH, ())
    view.append_record(make_record("b"), row)
    assert isinstance(view.resolve(probe(SECOND)), Match)  # nor do they make one ambiguous


def test_a_parent_without_a_staging_chain_cannot_be_continued(
    make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe
) -> None:
    view = ChainView()
    root = make_record("a")
    view.append_record(root, witness(FIRST, [said("A")]), staging_chain=())
    view.append_record(make_record("b", root), witness(SECOND, [said("B")]))
    view.append_record(make_record("c", make_record("lost")), witness([], [said("C")]))
    for items, call_id in ((SECOND, "a"), (THIRD, "b"), ([said("C")], "c")):
        unchained = Unresolved(UnresolvedReason.PARENT_NOT_CHAINED, (call_id,))
        assert view.resolve(probe(items)) == unchained
        assert view.staging_chain(call_id) == ()


def test_a_stated_chain_is_kept_and_inherited(
    make_record: MakeRecord, witness: MakeWitness
) -> None:
    view = ChainView()
    root = make_record("a")
    child = make_record("b", root)
    view.append_record(root, witness(FIRST, [said("A")]), ("elsewhere/0", "elsewhere/a"))
    view.append_record(child, witness(SECOND, [said("B")]))
    assert view.staging_chain("b") == ("elsewhere/0", "elsewhere/a", "attempt/b")
    assert view.staging_chain("unknown") == ()


@pytest.mark.requirement("ADM-8")
def test_what_a_row_keeps_does_not_grow_with_the_calls_before_it(
    make_record: MakeRecord, witness: MakeWitness
) -> None:
    view = ChainView()
    record, chain = None, ()
    for number in range(200):
        record = make_record(f"c{number}", record)
        chain = (*chain, record.staging_key)
        view.append_record(record, witness([], [said(str(number))]), chain)
        row = view.row(record.call_id)
        assert row is not None
        assert row.stated_chain is None
    assert view.staging_chain("c199") == chain


@pytest.mark.parametrize("position", [0, 1], ids=["in the context", "behind it"])
def test_an_unreadable_item_is_an_error_only_where_the_verdict_needs_it(
    chain: ChainView, probe: MakeProbe, position: int
) -> None:
    items = [*FIRST, said("A"), user("two")]
    items[1 if position == 0 else 3] = user(5)
    if position == 0:
        with pytest.raises(UnreadableItemError):
            chain.resolve(probe(items))
    else:
        assert isinstance(chain.resolve(probe(items)), Match)
    assert chain.resolve(probe([user(5)])) == Root(seeded=False)


@pytest.mark.requirement("LED-1")
def test_the_same_payload_again_is_a_no_op_and_another_is_refused(
    chain: ChainView, make_record: MakeRecord, witness: MakeWitness
) -> None:
    root = make_record("a")
    before = chain.manifest()
    kept = witness(SECOND, [said("B")])
    assert chain.append_record(make_record("b", root), kept) is False
    assert chain.append_record(make_record("b", root), kept, ("attempt/a", "attempt/b")) is False
    refused = [
        (make_record("b", root, admitted_at=100.5), kept, None),
        (make_record("b", root, weight_version=8), kept, None),
        (make_record("b", root, response_id="resp-other"), kept, None),
        (make_record("b", root), witness(THIRD, [said("B")]), None),
        (make_record("b", root), kept, ()),
    ]
    for record, row_witness, stated in refused:
        with pytest.raises(RowConflictError) as caught:
            chain.append_record(record, row_witness, stated)
        assert caught.value.call_id == "b"
    assert chain.manifest() == before


@pytest.mark.requirement("LED-1")
def test_failure_rows_repeat_by_reason_and_bar_a_later_record(
    chain: ChainView, make_record: MakeRecord, witness: MakeWitness
) -> None:
    assert chain.append_failure("z", "worker_capture_failed") is True
    assert chain.append_failure("z", "worker_capture_failed") is False
    assert chain.append_failure("z", "request_finished_without_staged_coordinates") is True
    with pytest.raises(RowConflictError, match="failure row"):
        chain.append_record(make_record("z"), witness(FIRST, [said("Z")]))
    assert chain.append_failure("b", "worker_capture_failed") is True  # after the record: both stay
    root = make_record("a")
    assert chain.append_record(make_record("b", root), witness(SECOND, [said("B")])) is False


@pytest.mark.requirement("LED-2")
def test_the_manifest_has_one_record_a_call_and_failures_in_log_order(
    chain: ChainView, make_record: MakeRecord, witness: MakeWitness
) -> None:
    chain.append_failure("z", "y")
    chain.append_record(make_record("a"), witness(FIRST, [said("A")]))
    chain.append_failure("c", "x")
    manifest = chain.manifest()
    assert [record.call_id for record in manifest.records] == ["a", "b"]
    assert manifest.failures == (CallFailure("z", "y"), CallFailure("c", "x"))


@pytest.mark.requirement("LED-2")
def test_has_rows_counts_records_and_failures(
    make_record: MakeRecord, witness: MakeWitness
) -> None:
    view = ChainView()
    assert not view.has_rows()
    view.append_record(make_record("a"), witness(FIRST, [said("A")]))
    assert view.has_rows()
    failed = ChainView()
    failed.append_failure("b", "unresolved_parent")
    assert failed.has_rows()


@pytest.mark.requirement("LED-2")
def test_resolving_changes_nothing(chain: ChainView, probe: MakeProbe) -> None:
    before = (chain.manifest(), chain.has_rows())
    for items in (FIRST, SECOND, THIRD, [said("?")]):
        assert chain.resolve(probe(items)) == chain.resolve(probe(items))
    assert (chain.manifest(), chain.has_rows()) == before


@pytest.mark.requirement("LED-12")
def test_a_failure_masks_but_does_not_stop_capture(chain: ChainView, probe: MakeProbe) -> None:
    chain.append_failure("z", "unresolved_parent")
    assert isinstance(chain.resolve(probe(THIRD)), Match)


@pytest.mark.parametrize(
    ("fingerprint", "digests", "count"),
    [(b"x", bytes(32), 0), (b"", b"", 0), (b"", bytes(33), 1), (b"", bytes(64), 0)],
    ids=["short fingerprint", "no digests", "part of a digest", "too many digests"],
)
def test_a_probe_that_does_not_fit_together_is_refused(
    fingerprint: bytes, digests: bytes, count: int
) -> None:
    with pytest.raises(ProbeError) as caught:
        ChainProbe(fingerprint, digests, count)
    assert caught.value.fact


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_do_not_depend_on_how_often_events_are_replayed(
    make_record: MakeRecord, witness: MakeWitness, probe: MakeProbe, seed: int
) -> None:
    choose = random.Random(seed)
    once, often = ChainView(), ChainView()
    applied: list[Callable[[ChainView], object]] = []
    records: list[CallRecord] = []
    conversations: list[list[object]] = [FIRST]
    for number in range(12):
        parent = choose.choice([None, *records])
        record = make_record(f"c{number}", parent)
        request = choose.choice(conversations)
        answer = said(choose.choice("XYZ"))
        row_witness = witness(request, [answer])
        if choose.random() < 0.2:
            applied.append(lambda view, call=record.call_id: view.append_failure(call, "f"))
        else:
            applied.append(lambda view, rec=record, wit=row_witness: view.append_record(rec, wit))
            records.append(record)
            conversations.append([*request, answer, user(str(number))])
        applied[-1](once)
        applied[-1](often)
        choose.choice(applied)(often)
    assert often.manifest() == once.manifest()
    for items in conversations:
        assert often.resolve(probe(items)) == once.resolve(probe(items))


def test_reasons_are_written_as_the_contract_has_them() -> None:
    """They are in failure rows, and stay."""
    assert [*map(str, UnresolvedReason)] == [
        *("no_match", "ambiguous", "context_changed", "parent_not_chained"),
    ]
