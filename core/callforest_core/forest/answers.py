"""Which calls the answers of a returned history are.

An answer is recognised whole, by its output summary; ids that the harness got from us choose among
equal ones and must not contradict what is said. Where more than one reading is left, none is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Final, NamedTuple, NoReturn, TypeAlias

from callforest_core.custody.call import CallRecord
from callforest_core.forest.history import Account, Passage, Reference, ShownItem
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError
from callforest_core.lineage.native_ids import call_ids_in
from callforest_core.lineage.source import EMPTY_HISTORY

_PERMUTED_MOST: Final = 6
"""Most items of an answer whose other orders are tried, to name what is wrong with it."""

_Key: TypeAlias = tuple[int, bytes]
_Calls: TypeAlias = frozenset[str]


class Shown(NamedTuple):
    """One whole answer of a history: the calls that it may be."""

    key: _Key
    candidates: _Calls


class CapturedAnswers:
    """The answers of an attempt, findable by content and by what the harness calls them.

    Args:
        records: of the attempt.
    """

    def __init__(self, records: Sequence[CallRecord]) -> None:
        self.records: Mapping[str, CallRecord] = {record.call_id: record for record in records}
        outputs: dict[_Key, set[str]] = {}
        names: dict[str, set[str]] = {}
        for record in records:
            names.setdefault(record.response_id, set()).add(record.call_id)
            if record.output is not None:
                key = (record.output.atom_count, record.output.digest)
                outputs.setdefault(key, set()).add(record.call_id)
        self._by_output = {key: frozenset(calls) for key, calls in outputs.items()}
        self._by_response = {name: frozenset(calls) for name, calls in names.items()}
        self._longest = max((key[0] for key in outputs), default=0)

    def saying(self, key: _Key) -> _Calls:
        """Give the calls with this output summary."""
        return self._by_output.get(key, frozenset())

    def called(self, name: str) -> _Calls:
        """Give the calls that a native id may name; none for one that we did not give."""
        made = call_ids_in([name]) & self.records.keys()
        return self._by_response.get(name, frozenset()) | made

    def referred(self, reference: Reference) -> _Calls:
        """Give the calls that a reference names by all its names."""
        named = [self.called(name) | ({name} & self.records.keys()) for name in reference.names]
        return frozenset.intersection(*named)

    def candidates(self, key: _Key, items: Iterable[ShownItem]) -> _Calls:
        """Give the calls that said this and that no native id of the items speaks against."""
        found = self.saying(key)
        for item in items:
            for native_id in item.native_ids:
                named = self.called(native_id)
                if named:
                    found &= named
        return found

    def prefixes(self, items: Sequence[ShownItem]) -> Iterator[tuple[int, _Key]]:
        """Give the summaries of the first items, one more each time, as far as any answer goes."""
        history = EMPTY_HISTORY
        for count, shown in enumerate(items, 1):
            history = history.extended([shown.item])
            if history.atom_count > self._longest:
                return
            yield count, (history.atom_count, history.source_digest)


def read_account(captured: CapturedAnswers, account: Account, among: _Calls | None) -> list[Shown]:
    """Cut an account into whole answers.

    Args:
        captured: the attempt.
        account: what is told.
        among: the calls that may be meant; None for all of the attempt.

    Raises:
        SelectionRefusedError: it cannot be cut, or not in one way.
    """
    return [
        one
        for number, passage in enumerate(account.passages)
        for one in read_passage(captured, passage, among, account.passages[number + 1 :])
    ]


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
        shown += _cut(captured, run, among, behind)
    named = captured.called(passage.response_id) if shown else frozenset()
    if not named:
        return shown
    if pinned := shown[-1].candidates & named:
        shown[-1] = shown[-1]._replace(candidates=pinned)
    elif not any(one.candidates & named for one in shown):
        detail = f"the response {passage.response_id} shows what its call did not say"
        raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail, named)
    return shown


def _cut(
    captured: CapturedAnswers,
    run: Sequence[ShownItem],
    among: _Calls | None,
    behind: Sequence[ShownItem],
) -> list[Shown]:
    """Cut a run into whole answers, in the one way in which that can be done."""
    answers: dict[int, list[tuple[int, Shown]]] = {}
    waiting = [0]
    while waiting:
        start = waiting.pop()
        if start == len(run) or start in answers:
            continue
        answers[start] = []
        for count, key in captured.prefixes(run[start:]):
            found = captured.candidates(key, run[start : start + count])
            if among is not None:
                found &= among
            if found:
                answers[start].append((start + count, Shown(key, found)))
                waiting.append(start + count)
    ways = {len(run): 1}
    for start in sorted(answers, reverse=True):
        ways[start] = min(2, sum(ways[end] for end, _ in answers[start]))
    if ways[0] > 1:
        raise SelectionRefusedError(
            SelectionFault.ANSWER_AMBIGUOUS, "items can be cut into answers in several ways"
        )
    if ways[0] == 0:
        _refuse_run(captured, run[max(answers) :], behind)
    shown: list[Shown] = []
    at = 0
    while at < len(run):
        at, one = next(step for step in answers[at] if ways[step[0]])
        shown.append(one)
    return shown


def _refuse_run(
    captured: CapturedAnswers, items: Sequence[ShownItem], behind: Sequence[ShownItem]
) -> NoReturn:
    """Name what is wrong with items that begin with no whole answer."""
    for count, key in captured.prefixes([*items, *behind]):
        if said := captured.saying(key):
            if count > len(items):
                detail = "something stands between the items of an answer"
                raise SelectionRefusedError(SelectionFault.ANSWER_SPLIT, detail, said)
            detail = "ids name another call than the one that said this"
            raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail, said)
    for count in range(2, min(_PERMUTED_MOST, len(items)) + 1):
        for order in permutations(items[:count]):
            tried = list(captured.prefixes(order))
            if len(tried) == count and (said := captured.saying(tried[-1][1])):
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
