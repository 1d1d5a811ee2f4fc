"""Which calls a returned history selects: each answer gets its call, or the history is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeAlias

from callforest_core.custody.call import CallRecord
from callforest_core.forest.answers import CapturedAnswers, Shown, read_account, read_passage
from callforest_core.forest.history import Account, Passage, Reference, ReturnedHistory
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError

_Place: TypeAlias = str | Shown
"""One of the answers in order: its call, or what is shown of a lost call's."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a returned history selects.

    Attributes:
        call_ids: in history order.
        last_call_id: the call whose answer the scored response ends with, if the history tells.
    """

    call_ids: tuple[str, ...]
    last_call_id: str | None


def returned_calls(
    records: Sequence[CallRecord], history: ReturnedHistory, lost: frozenset[str] = frozenset()
) -> Returned:
    """Say which calls a history shows.

    Args:
        records: of the attempt.
        history: what its harness returned.
        lost: calls that have no record, whose answers may be shown all the same; empty unless
            what is verified of an incomplete attempt is to train (FIN-8).

    Raises:
        SelectionRefusedError: its evidence is missing, contradictory, duplicated or ambiguous.
    """
    captured = CapturedAnswers(records, lost)
    references = None if history.references is None else _referred(captured, history.references)
    told = [_told(captured, account, references) for account in history.accounts]
    if not all(_alike(one.places, other.places) for one, other in combinations(told, 2)):
        names = " and ".join(account.name for account in history.accounts)
        raise _contradiction(f"{names} do not show the same answers")
    places = told[0].places if told else references or ()
    call_ids = _calls(places)
    if not call_ids:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    _check_order(captured, call_ids)
    return Returned(call_ids, _last(captured, history, told, places))


def _referred(captured: CapturedAnswers, references: Sequence[Reference]) -> tuple[_Place, ...]:
    places: list[_Place] = []
    for reference in references:
        if lost := captured.lost_among(reference.names):
            places.append(Shown(frozenset(), (), lost))
            continue
        named = captured.referred(reference)
        if len(named) != 1:
            detail = f"{'/'.join(reference.names)} names {len(named)} calls of the attempt"
            raise SelectionRefusedError(SelectionFault.REFERENCE_UNKNOWN, detail, named)
        (call_id,) = named
        if call_id in places:
            raise SelectionRefusedError(SelectionFault.REFERENCE_DUPLICATED, "", [call_id])
        places.append(call_id)
    return tuple(places)


class _Told(NamedTuple):
    """What an account shows: the answers in order, and which it ends with, if that is known.

    Snapshots may end with an answer that was shown before. `last` is never a lost call's.
    """

    places: tuple[_Place, ...]
    last: str | None


def _told(
    captured: CapturedAnswers, account: Account, references: tuple[_Place, ...] | None
) -> _Told:
    """Say which calls one account shows, with the references as a second witness."""
    if references is None:
        return _resolve(captured, _captured(captured, account, None), account)
    try:
        shown = _captured(captured, account, frozenset(_calls(references)))
    except SelectionRefusedError:
        read_account(captured, account, None)  # what is wrong with the account alone is said first
        raise _contradiction(f"{account.name} shows answers that no reference names") from None
    places: list[_Place] = []
    passed: set[str] = set()
    last = None
    for one in shown:
        here = references[len(places)] if len(places) < len(references) else None
        again = one.candidates & passed
        if isinstance(here, str) and here in one.candidates:
            last = here
            passed.add(here)
            places.append(here)
        elif isinstance(here, Shown) and here.can_be(one):
            places.append(one._replace(lost=one.lost | here.lost))
        elif account.repeats and again:
            last = _only(again)
        else:
            detail = f"{account.name} and the references differ at answer {len(places) + 1}"
            raise _contradiction(detail)
    if len(places) != len(references):
        raise _contradiction(f"{account.name} does not show every referenced call")
    return _Told(tuple(places), last)


def _captured(
    captured: CapturedAnswers, account: Account, among: frozenset[str] | None
) -> list[Shown]:
    """Give the answers of an account; of those of lost calls there are not more than such calls."""
    shown: list[Shown] = []
    lost: list[Shown] = []
    for one in read_account(captured, account, among):
        if not account.repeats or not any(one.lost & by.lost and one.can_be(by) for by in lost):
            shown.append(one)
            lost += [one] if one.lost else []
    if sum(not one.candidates for one in shown) > len(captured.lost):
        detail = "more answers are shown that no call gave than calls were lost"
        raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail)
    return shown


def _alike(first: Sequence[_Place], second: Sequence[_Place]) -> bool:
    """Say whether two accounts show the same, answers of lost calls in their places too."""
    return len(first) == len(second) and all(
        one.can_be(other) if isinstance(one, Shown) and isinstance(other, Shown) else one == other
        for one, other in zip(first, second, strict=True)
    )


def _calls(places: Sequence[_Place]) -> tuple[str, ...]:
    """Give the calls among answers, without those that are lost."""
    return tuple(place for place in places if isinstance(place, str))


def _resolve(captured: CapturedAnswers, shown: Sequence[Shown], account: Account) -> _Told:
    """Give each answer its call.

    Equal answers that are all shown are all selected; which of them is which makes no difference
    but for their order, and they stand in the order of their intents. Answers of lost calls keep
    their places.

    Raises:
        SelectionRefusedError: `answer_duplicated` or `answer_ambiguous`.
    """
    kept, calls, again = _named(shown, account)
    answered = [place for place, one in enumerate(kept) if one.candidates]
    while waiting := [place for place in answered if place not in calls]:
        taken = set(calls.values())
        alike: dict[frozenset[str], list[int]] = {}
        for place in waiting:
            alike.setdefault(kept[place].candidates - taken, []).append(place)
        told: dict[int, str] = {}
        for free, places in alike.items():
            if len(free) < len(places):
                detail = "shown more often than it was given"
                calls_at_fault = sorted(kept[places[0]].candidates)
                raise SelectionRefusedError(
                    SelectionFault.ANSWER_DUPLICATED, detail, calls_at_fault
                )
            if len(free) == len(places) and not again:
                announced = [call_id for call_id in captured.records if call_id in free]
                told.update(zip(places, announced, strict=True))
        if not told:
            detail = "several calls gave this answer, and no id tells which"
            raise SelectionRefusedError(
                SelectionFault.ANSWER_AMBIGUOUS, detail, sorted(kept[waiting[0]].candidates)
            )
        calls.update(told)
    in_order = tuple[_Place, ...](calls.get(place, one) for place, one in enumerate(kept))
    ends = [one.candidates for one in shown if one.candidates]
    # What is shown again is one call's alone; equal answers are kept.
    return _Told(in_order, (_only(ends[-1]) or calls[answered[-1]]) if ends else None)


def _named(shown: Sequence[Shown], account: Account) -> tuple[list[Shown], dict[int, str], bool]:
    """Give the answers without those shown again, the calls of those that one alone can be.

    The last value says whether an answer was shown again.
    """
    kept: list[Shown] = []
    calls: dict[int, str] = {}
    taken: set[str] = set()
    for one in shown:
        if len(one.candidates) == 1:
            (call_id,) = one.candidates
            if call_id in taken:
                if not account.repeats:
                    detail = "shown twice"
                    raise SelectionRefusedError(SelectionFault.ANSWER_DUPLICATED, detail, [call_id])
                continue
            taken.add(call_id)
            calls[len(kept)] = call_id
        kept.append(one)
    return kept, calls, len(kept) < len(shown)


def _check_order(captured: CapturedAnswers, call_ids: Sequence[str]) -> None:
    """Refuse a history in which an answer stands before one that it was given."""
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    for call_id, place in places.items():
        parent = captured.records[call_id].parent_call_id
        if parent is not None and places.get(parent, -1) > place:
            detail = "an answer stands before the one that it continues"
            raise SelectionRefusedError(SelectionFault.ANSWER_REORDERED, detail, [call_id])


def _last(
    captured: CapturedAnswers,
    history: ReturnedHistory,
    told: Sequence[_Told],
    places: Sequence[_Place],
) -> str | None:
    """Give the call that the result's own response ends with.

    All that it shows must be in the history, and all that tell it must show the same.
    """
    responses = [response for response in history.responses if response.runs]
    if captured.lost:
        for response in responses:
            if not read_passage(captured, response, None)[-1].candidates:
                detail = "the scored answer is that of a lost call"
                raise SelectionRefusedError(SelectionFault.TERMINAL_MISSING, detail)
    ends = [
        (account.passages[-1:], one.last)
        for account, one in zip(history.accounts, told, strict=True)
    ]
    known = {
        next((last for ending, last in ends if ending == (response,)), None)
        for response in responses
    }
    if len(known) == 1 and None not in known:
        return known.pop()
    shown = [_selected(captured, response, places) for response in responses]
    if any(not _agree(one, shown[0]) for one in shown):
        raise _contradiction("the response is told in two ways that do not show the same answers")
    named = [one[-1].candidates for one in shown]
    return _only(frozenset.intersection(*named)) if named else None


def _selected(
    captured: CapturedAnswers, response: Passage, places: Sequence[_Place]
) -> list[Shown]:
    foreign = "the response shows an answer that the history does not"
    try:
        shown = read_passage(captured, response, frozenset(_calls(places)))
    except SelectionRefusedError:
        read_passage(captured, response, None)
        raise _contradiction(foreign) from None
    lost = [place for place in places if isinstance(place, Shown)]
    for one in shown:
        if one.candidates:
            continue
        if not (alike := [place for place, other in enumerate(lost) if one.can_be(other)]):
            raise _contradiction(foreign)
        lost.pop(alike[0])
    return shown


def _agree(first: Sequence[Shown], second: Sequence[Shown]) -> bool:
    """Say whether two readings can be of the same calls."""
    return len(first) == len(second) and all(
        one.can_be(other) for one, other in zip(first, second, strict=True)
    )


def _only(calls: frozenset[str]) -> str | None:
    """Give the call of a set of one, or None."""
    return next(iter(calls)) if len(calls) == 1 else None


def _contradiction(detail: str) -> SelectionRefusedError:
    return SelectionRefusedError(SelectionFault.HISTORY_CONTRADICTS_REFERENCES, detail)
