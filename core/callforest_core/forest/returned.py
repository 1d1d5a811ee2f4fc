"""Which calls a returned history selects: each answer gets its call, or the history is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from callforest_core.custody.call import CallRecord
from callforest_core.forest.answers import CapturedAnswers, Shown, read_account, read_passage
from callforest_core.forest.history import Account, Passage, Reference, ReturnedHistory
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError


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
    if any(other.call_ids != told[0].call_ids for other in told):
        names = " and ".join(account.name for account in history.accounts)
        raise _contradiction(f"{names} do not show the same answers")
    call_ids = told[0].call_ids if told else references
    if not call_ids:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    _check_order(captured, call_ids)
    return Returned(call_ids, _last(captured, history, told, call_ids))


def _referred(captured: CapturedAnswers, references: Sequence[Reference]) -> tuple[str, ...]:
    call_ids: list[str] = []
    for reference in references:
        if captured.names_lost(reference):
            continue
        named = captured.referred(reference)
        if len(named) != 1:
            detail = f"{'/'.join(reference.names)} names {len(named)} calls of the attempt"
            raise SelectionRefusedError(SelectionFault.REFERENCE_UNKNOWN, detail, named)
        (call_id,) = named
        if call_id in call_ids:
            raise SelectionRefusedError(SelectionFault.REFERENCE_DUPLICATED, "", [call_id])
        call_ids.append(call_id)
    return tuple(call_ids)


class _Told(NamedTuple):
    """What an account shows: the calls in order, and whose answer it ends with, if that is known.

    Snapshots may end with an answer that was shown before.
    """

    call_ids: tuple[str, ...]
    last: str | None


def _told(captured: CapturedAnswers, account: Account, references: tuple[str, ...] | None) -> _Told:
    """Say which calls one account shows, with the references as a second witness."""
    if references is None:
        return _resolve(captured, _captured(captured, account, None), account)
    try:
        shown = _captured(captured, account, frozenset(references))
    except SelectionRefusedError:
        read_account(captured, account, None)  # what is wrong with the account alone is said first
        raise _contradiction(f"{account.name} shows answers that no reference names") from None
    at, last = 0, None
    for one in shown:
        again = one.candidates & set(references[:at])
        if at < len(references) and references[at] in one.candidates:
            last = references[at]
            at += 1
        elif account.repeats and again:
            last = _only(again)
        else:
            raise _contradiction(f"{account.name} and the references differ at answer {at + 1}")
    if at != len(references):
        raise _contradiction(f"{account.name} does not show every referenced call")
    return _Told(references, last)


def _captured(
    captured: CapturedAnswers, account: Account, among: frozenset[str] | None
) -> list[Shown]:
    """Give the answers of an account without those of lost calls, of which there are not more."""
    shown = read_account(captured, account, among)
    known = [one for one in shown if one.candidates]
    if len(shown) - len(known) > len(captured.lost):
        detail = "more answers are shown that no call gave than calls were lost"
        raise SelectionRefusedError(SelectionFault.ANSWER_NOT_CAPTURED, detail)
    return known


def _resolve(captured: CapturedAnswers, shown: Sequence[Shown], account: Account) -> _Told:
    """Give each answer its call.

    Equal answers that are all shown are all selected; which of them is which makes no difference
    but for their order, and they stand in the order of their intents.

    Raises:
        SelectionRefusedError: `answer_duplicated` or `answer_ambiguous`.
    """
    kept, calls, again = _named(shown, account)
    while waiting := [place for place in range(len(kept)) if place not in calls]:
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
    call_ids = tuple(calls[place] for place in range(len(kept)))
    # What is shown again is one call's alone; equal answers are kept.
    return _Told(call_ids, (_only(shown[-1].candidates) or call_ids[-1]) if shown else None)


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
    call_ids: tuple[str, ...],
) -> str | None:
    """Give the call that the result's own response ends with.

    All that it shows must be selected, and all that tell it must show the same.
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
    shown = [_selected(captured, response, call_ids) for response in responses]
    if any(not _agree(one, shown[0]) for one in shown):
        raise _contradiction("the response is told in two ways that do not show the same answers")
    named = [one[-1].candidates for one in shown]
    return _only(frozenset.intersection(*named)) if named else None


def _selected(
    captured: CapturedAnswers, response: Passage, call_ids: tuple[str, ...]
) -> list[Shown]:
    try:
        return read_passage(captured, response, frozenset(call_ids))
    except SelectionRefusedError:
        read_passage(captured, response, None)
        raise _contradiction("the response shows an answer that the history does not") from None


def _agree(first: Sequence[Shown], second: Sequence[Shown]) -> bool:
    """Say whether two readings can be of the same calls."""
    return len(first) == len(second) and all(
        one.candidates & other.candidates for one, other in zip(first, second, strict=True)
    )


def _only(calls: frozenset[str]) -> str | None:
    """Give the call of a set of one, or None."""
    return next(iter(calls)) if len(calls) == 1 else None


def _contradiction(detail: str) -> SelectionRefusedError:
    return SelectionRefusedError(SelectionFault.HISTORY_CONTRADICTS_REFERENCES, detail)
