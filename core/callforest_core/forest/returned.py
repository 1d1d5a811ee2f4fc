"""Which calls a returned history selects: each answer gets its call, or the history is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callforest_core.custody.call import CallRecord
from callforest_core.forest.answers import CapturedAnswers, Shown, read_account, read_passage
from callforest_core.forest.history import Account, Reference, ReturnedHistory
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
    if any(other != told[0] for other in told):
        names = " and ".join(account.name for account in history.accounts)
        raise _contradiction(f"{names} do not show the same answers")
    call_ids = told[0] if told else references
    if not call_ids:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    _check_order(captured, call_ids)
    return Returned(call_ids, _last(captured, history, call_ids))


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


def _told(
    captured: CapturedAnswers, account: Account, references: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Say which calls one account shows, with the references as a second witness."""
    if references is None:
        return _resolve(captured, _captured(captured, account, None), account)
    try:
        shown = _captured(captured, account, frozenset(references))
    except SelectionRefusedError:
        read_account(captured, account, None)  # what is wrong with the account alone is said first
        raise _contradiction(f"{account.name} shows answers that no reference names") from None
    at = 0
    for one in shown:
        if at < len(references) and references[at] in one.candidates:
            at += 1
        elif not (account.repeats and one.candidates & set(references[:at])):
            raise _contradiction(f"{account.name} and the references differ at answer {at + 1}")
    if at != len(references):
        raise _contradiction(f"{account.name} does not show every referenced call")
    return references


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


def _resolve(
    captured: CapturedAnswers, shown: Sequence[Shown], account: Account
) -> tuple[str, ...]:
    """Give each answer its call.

    Equal answers that are all shown are all selected; which of them is which makes no difference
    but for their order, and they stand as they were committed.

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
                told.update(zip(places, _in_commit_order(captured.records, free), strict=True))
        if not told:
            detail = "several calls gave this answer, and no id tells which"
            raise SelectionRefusedError(
                SelectionFault.ANSWER_AMBIGUOUS, detail, sorted(kept[waiting[0]].candidates)
            )
        calls.update(told)
    return tuple(calls[place] for place in range(len(kept)))


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


def _in_commit_order(records: Mapping[str, CallRecord], calls: frozenset[str]) -> list[str]:
    """Order calls as they were committed, each behind those of them that it continues."""
    ordered: list[str] = []
    seen: set[str] = set()
    for call_id in records:
        if call_id not in calls:
            continue
        line: list[str] = []
        cursor: str | None = call_id
        while cursor is not None and cursor in records and cursor not in seen:
            seen.add(cursor)
            line.append(cursor)
            cursor = records[cursor].parent_call_id
        ordered += [one for one in reversed(line) if one in calls]
    return ordered


def _check_order(captured: CapturedAnswers, call_ids: Sequence[str]) -> None:
    """Refuse a history in which an answer stands before one that it was given."""
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    for call_id, place in places.items():
        parent = captured.records[call_id].parent_call_id
        if parent is not None and places.get(parent, -1) > place:
            detail = "an answer stands before the one that it continues"
            raise SelectionRefusedError(SelectionFault.ANSWER_REORDERED, detail, [call_id])


def _last(
    captured: CapturedAnswers, history: ReturnedHistory, call_ids: tuple[str, ...]
) -> str | None:
    """Give the call that the result's own response ends with; all it shows must be selected."""
    response = history.response
    if response is None or not response.runs:
        return None
    if captured.lost and not read_passage(captured, response, None)[-1].candidates:
        detail = "the scored answer is that of a lost call"
        raise SelectionRefusedError(SelectionFault.TERMINAL_MISSING, detail)
    if any(account.passages[-1:] == (response,) for account in history.accounts):
        return call_ids[-1]
    try:
        shown = read_passage(captured, response, frozenset(call_ids))
    except SelectionRefusedError:
        read_passage(captured, response, None)
        raise _contradiction("the response shows an answer that the history does not") from None
    named = shown[-1].candidates
    return next(iter(named)) if len(named) == 1 else None


def _contradiction(detail: str) -> SelectionRefusedError:
    return SelectionRefusedError(SelectionFault.HISTORY_CONTRADICTS_REFERENCES, detail)
