"""Which calls the answers of a returned history are.

An answer is recognised whole, by its output summary; ids that the harness got from us choose among
equal ones and must not contradict what is said. Where more than one reading is left, none is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, permutations
from typing import Final, NamedTuple, NoReturn, TypeAlias

from callforest_core.custody.call import CallRecord
from callforest_core.forest.cuts import one_cut
from callforest_core.forest.history import Account, Passage, Reference, ShownItem
from callforest_core.forest.selection import (
    SelectionFault,
    SelectionRefusedError,
    in_intent_order,
)
from callforest_core.lineage.native_ids import call_ids_in
from callforest_core.lineage.source import EMPTY_HISTORY, SOURCE_VERSION, SourceHistory

_PERMUTED_MOST: Final = 6
"""Most items of an answer whose other orders are tried, to name what is wrong with it."""

_SUMMARISED: Final[Mapping[int, SourceHistory]] = {SOURCE_VERSION: EMPTY_HISTORY}
"""The versions of the rules for atoms that can be summarised, by where a summary begins."""

_Key: TypeAlias = tuple[int, int, bytes]
"""(normalization version, atoms, digest)"""
_Calls: TypeAlias = frozenset[str]


class Shown(NamedTuple):
    """One whole answer of a history, or a reference to a lost call.

    Attributes:
        candidates: the calls that it may be; none for one of a lost call.
        items: what it says; nothing when it is only referred to.
        lost: of the answer of a lost call, the calls that its ids name.
    """

    candidates: _Calls
    items: tuple[ShownItem, ...] = ()
    lost: _Calls = frozenset()

    def can_be(self, other: Shown) -> bool:
        """Say whether two tellings can be of one answer.

        Those of a lost call's answer can if they say the same and name no different calls.
        """
        if self.candidates or other.candidates:
            return bool(self.candidates & other.candidates)
        if self.lost and other.lost and not self.lost & other.lost:
            return False
        return not (self.items and other.items) or self._said == other._said

    @property
    def _said(self) -> tuple[int, bytes]:
        said = EMPTY_HISTORY.extended([one.item for one in self.items])
        return said.atom_count, said.source_digest


class CapturedAnswers:
    """The answers of an attempt, findable by content and by what the harness calls them.

    Args:
        records: of the attempt, in any order.
        lost: calls of it that have no record; at most as many answers may be shown that no record
            has.

    Attributes:
        records: by call, in the order of their intents, none before the one that it continues.
    """

    def __init__(self, records: Sequence[CallRecord], lost: frozenset[str] = frozenset()) -> None:
        self.lost = lost
        self.records: Mapping[str, CallRecord] = {
            record.call_id: record for record in in_intent_order(records)
        }
        outputs: dict[_Key, set[str]] = {}
        names: dict[str, set[str]] = {}
        for record in records:
            names.setdefault(record.response_id, set()).add(record.call_id)
            if record.output is not None:
                said = record.output
                key = (said.normalization_version, said.atom_count, said.digest)
                outputs.setdefault(key, set()).add(record.call_id)
        self._by_output = {key: frozenset(calls) for key, calls in outputs.items()}
        self._by_response = {name: frozenset(calls) for name, calls in names.items()}
        self._longest = max((key[1] for key in outputs), default=0)
        self._versions = sorted({key[0] for key in outputs})

    def check_versions(self) -> None:
        """Refuse to compare what is shown with answers that were summarised by unknown rules.

        Raises:
            SelectionRefusedError: `normalization_unsupported`.
        """
        unknown = [version for version in self._versions if version not in _SUMMARISED]
        if unknown:
            detail = f"answers were summarised by the rules of version {unknown[0]}"
            calls = [calls for key, calls in self._by_output.items() if key[0] in unknown]
            raise SelectionRefusedError(
                SelectionFault.NORMALIZATION_UNSUPPORTED, detail, sorted(frozenset().union(*calls))
            )

    def called(self, name: str) -> _Calls:
        """Give the calls that a native id may name; none for one that we did not give."""
        made = call_ids_in([name]) & self.records.keys()
        return self._by_response.get(name, frozenset()) | made

    def referred(self, reference: Reference) -> _Calls:
        """Give the calls that a reference names by all its names."""
        named = [self.called(name) | ({name} & self.records.keys()) for name in reference.names]
        return frozenset.intersection(*named)

    def lost_among(self, native_ids: Iterable[str]) -> _Calls:
        """Give the calls without a record that ids name."""
        return call_ids_in(native_ids) & self.lost

    def candidates(self, said: _Calls, items: Iterable[ShownItem]) -> _Calls:
        """Give those of the calls that said this that no native id of the items speaks against."""
        found = said
        for item in items:
            for native_id in item.native_ids:
                named = self.called(native_id)
                if named:
                    found &= named
        return found

    def prefixes(self, items: Sequence[ShownItem]) -> Iterator[tuple[int, _Calls]]:
        """Give the calls that said the first items, one more each time, as far as any answer goes.

        The items are summarised by the rules of each version that an answer was summarised by.

        Raises:
            SelectionRefusedError: `normalization_unsupported`.
        """
        self.check_versions()
        histories = {version: _SUMMARISED[version] for version in self._versions}
        for count, shown in enumerate(items, 1):
            histories = {
                version: longer
                for version, history in histories.items()
                if (longer := history.extended([shown.item])).atom_count <= self._longest
            }
            if not histories:
                return
            said = [
                self._by_output.get((version, one.atom_count, one.source_digest), frozenset())
                for version, one in histories.items()
            ]
            yield count, frozenset().union(*said)


def read_account(captured: CapturedAnswers, account: Account, among: _Calls | None) -> list[Shown]:
    """Cut an account into whole answers.

    Args:
        captured: the attempt.
        account: what is told.
        among: the calls that may be meant; None for all of the attempt.

    Raises:
        SelectionRefusedError: it cannot be cut, or not in one way.
    """
    shown: list[Shown] = []
    for number, passage in enumerate(account.passages):
        if passage.runs:
            shown += read_passage(captured, passage, among, account.passages[number + 1 :])
            continue
        for one in _read_again(captured, passage, among):
            if shown and not one.candidates and one.can_be(shown[-1]):
                shown[-1] = shown[-1]._replace(lost=shown[-1].lost | one.lost)
            else:
                shown.append(one)
    return shown


def read_passage(
    captured: CapturedAnswers,
    passage: Passage,
    among: _Calls | None,
    following: Sequence[Passage] = (),
) -> list[Shown]:
    """Cut one passage into whole answers, as `read_account` does.

    The id of the response as a whole is its last call's, or another's that it shows.
    """
    shown: list[Shown] = []
    for number, run in enumerate(passage.runs):
        behind = [item for later in passage.runs[number + 1 :] for item in later]
        behind += [item for later in following for item in later.items]
        if not captured.lost:
            shown += _cut(captured, run, among, behind)
            continue
        for lost, items in groupby(run, lambda item: captured.lost_among(item.native_ids)):
            if lost:
                shown.append(Shown(frozenset(), tuple(items), lost))
            else:
                shown += _cut_or_lost(captured, [*items], among, behind)
    if shown and (lost := captured.lost_among([passage.response_id])):
        return _with_lost(shown, lost)
    named = captured.called(passage.response_id) if shown else frozenset()
    if not named:
        return shown
    if pinned := shown[-1].candidates & named:
        shown[-1] = shown[-1]._replace(candidates=pinned)
    elif not any(one.candidates & named for one in shown):
        detail = f"the response {passage.response_id} shows what its call did not say"
        raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail, named)
    return shown


def _with_lost(shown: Sequence[Shown], lost: _Calls) -> list[Shown]:
    """Say which answer of a response is that of the lost call that its id names.

    It is the last one, whoever else said the same, unless answers of lost calls are shown anyway.
    """
    open_places = [place for place, one in enumerate(shown) if not one.candidates]
    place = open_places[0] if open_places else len(shown) - 1
    if len(open_places) > 1 or shown[place].lost:
        return [*shown]
    return [*shown[:place], Shown(frozenset(), shown[place].items, lost), *shown[place + 1 :]]


def _read_again(captured: CapturedAnswers, passage: Passage, among: _Calls | None) -> list[Shown]:
    """Give the answer that a snapshot names by its id when it shows nothing new.

    It may be another that says the same as the one before it, that of a lost call too.
    """
    named = captured.called(passage.response_id)
    lost = captured.lost_among([passage.response_id])
    if not named and not lost:
        return []
    shown = read_passage(captured, replace(passage, runs=passage.again), among)
    if lost:
        return [one for one in shown if one.lost & lost][-1:]
    return [one for one in shown[-1:] if one.candidates <= named]


def _cut_or_lost(
    captured: CapturedAnswers,
    run: Sequence[ShownItem],
    among: _Calls | None,
    behind: Sequence[ShownItem],
) -> list[Shown]:
    """Cut a run as `_cut` does, or take it for the answer of a lost call if nobody else said it."""
    try:
        return _cut(captured, run, among, behind)
    except SelectionRefusedError as error:
        if error.fault is not SelectionFault.ANSWER_NOT_CAPTURED or error.call_ids:
            raise
        return [Shown(frozenset(), tuple(run))]


def _cut(
    captured: CapturedAnswers,
    run: Sequence[ShownItem],
    among: _Calls | None,
    behind: Sequence[ShownItem],
) -> list[Shown]:
    """Cut a run into whole answers, in the one way in which that can be done."""
    answers: dict[int, list[tuple[int, _Calls]]] = {}
    waiting = [0]
    while waiting:
        start = waiting.pop()
        if start == len(run) or start in answers:
            continue
        answers[start] = []
        for count, said in captured.prefixes(run[start:]):
            found = captured.candidates(said, run[start : start + count])
            if among is not None:
                found &= among
            if found:
                answers[start].append((start + count, found))
                waiting.append(start + count)
    cut = one_cut(answers, len(run), captured.records)
    if cut is None:
        _refuse_run(captured, run[max(answers) :], behind)
    starts = [0, *(end for end, _ in cut)]
    parts = zip(starts, cut, strict=False)
    return [Shown(calls, tuple(run[start:end])) for start, (end, calls) in parts]


def _refuse_run(
    captured: CapturedAnswers, items: Sequence[ShownItem], behind: Sequence[ShownItem]
) -> NoReturn:
    """Name what is wrong with items that begin with no whole answer."""
    for count, said in captured.prefixes([*items, *behind]):
        if said:
            if count > len(items):
                detail = "something stands between the items of an answer"
                raise SelectionRefusedError(SelectionFault.ANSWER_SPLIT, detail, said)
            detail = "ids name another call than the one that said this"
            raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail, said)
    for count in range(2, min(_PERMUTED_MOST, len(items)) + 1):
        for order in permutations(items[:count]):
            tried = list(captured.prefixes(order))
            if len(tried) == count and (said := tried[-1][1]):
                detail = "the items of an answer stand in another order"
                raise SelectionRefusedError(SelectionFault.ANSWER_REORDERED, detail, said)
    named = frozenset(
        call_id for native_id in items[0].native_ids for call_id in captured.called(native_id)
    )
    if any(_is_part(captured, call_id, items) for call_id in named):
        detail = "an answer is not shown whole"
        raise SelectionRefusedError(SelectionFault.ANSWER_SPLIT, detail, named)
    detail = "no call said this as it is shown"
    raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail, named)


def _is_part(captured: CapturedAnswers, call_id: str, items: Sequence[ShownItem]) -> bool:
    """Say whether fewer items carry a call's id than its answer must have."""
    output = captured.records[call_id].output
    own = [
        item
        for item in items
        if any(call_id in captured.called(native_id) for native_id in item.native_ids)
    ]
    shown = EMPTY_HISTORY.extended([item.item for item in own])
    return output is not None and shown.atom_count < output.atom_count
