"""What a harness returns of a rollout: the answers that it accepted, as its result shows them.

A result shows answers whole and in order, as `response.output` (or `output`), an ordered list
`responses`, snapshots in `transitions`, or as references in `ng_trajectory.turns[].model_calls`.
Here they are only read; `answers` says which calls they are. Nothing is guessed: what cannot be
read is refused. Nothing is passed over either: a response that is told twice, by `output` and by
`choices` say, makes two accounts. What only has such a name, as the choices of a question have, is
no telling beside answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from callforest_core.forest.selection import SelectionFault, SelectionRefusedError
from callforest_core.forest.telling import Telling, as_list, members_of, tellings, unreadable
from callforest_core.lineage.atoms import item_atoms
from callforest_core.lineage.fingerprint import UnreadableItemError

_OBSERVATION_ROLES: Final = frozenset({"user", "system", "developer", "tool"})
_OBSERVATION_TYPES: Final = frozenset({"function_call_output"})
_REFERENCE_KEYS: Final = ("model_call_id", "call_id", "response_id")
_HISTORIES: Final = ("responses", "transitions")
"""Members of a result that tell the history apart from its own response."""


class ShownItem(NamedTuple):
    """An item that a model wrote.

    Attributes:
        item: as the harness returned it.
        native_ids: ids that it or what holds it carries; most name nothing here.
    """

    item: object
    native_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """One response, or one snapshot.

    Attributes:
        runs: items that follow each other without an observation between; each run is one answer
            or several.
        response_id: the id of the response as a whole, or "".
        again: of a snapshot that shows nothing new, what it shows again; only its id can tell
            whether that is another answer that says the same.
    """

    runs: tuple[tuple[ShownItem, ...], ...]
    response_id: str = ""
    again: tuple[tuple[ShownItem, ...], ...] = field(default=(), compare=False)

    @property
    def items(self) -> list[ShownItem]:
        """All items, observations left out."""
        return [item for run in self.runs for item in run]


@dataclass(frozen=True, slots=True)
class Reference:
    """A call as a trajectory names it; at least one id is given, and all must name one call."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """One telling of the whole history.

    Attributes:
        name: of the member of the result that tells it.
        passages: in order.
        repeats: whether a passage may show again what an earlier one showed, as snapshots do.
    """

    name: str
    passages: tuple[Passage, ...]
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class ReturnedHistory:
    """Everything that a result shows.

    Attributes:
        accounts: each a whole account of the accepted answers; if there are several, they must
            agree.
        responses: the scored response, once for each member of the result that tells it. Without
            `responses` and `transitions` they are the accounts; they must agree with each other in
            any case.
        references: calls named one by one, or None when the result has no trajectory.
    """

    accounts: tuple[Account, ...]
    responses: tuple[Passage, ...]
    references: tuple[Reference, ...] | None


def read_history(result: object) -> ReturnedHistory:
    """Read what a result shows.

    Args:
        result: the harness's result as parsed JSON; None when it gave none.

    Raises:
        SelectionRefusedError: it shows nothing (`history_missing`) or cannot be read
            (`history_unreadable`).
    """
    if result is None:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "no result was given")
    if not isinstance(result, dict):
        raise unreadable("the result is no object")
    accounts: list[Account] = []
    if (responses := result.get("responses")) is not None:
        parts = [[[one] for one in tellings(response)] for response in as_list(responses)]
        for name, told in _named("responses", _readings(parts)):
            passages = tuple(_passage(one.items, one.response_id) for one in told)
            accounts.append(Account(name, passages))
    if (transitions := result.get("transitions")) is not None:
        accounts += _snapshots("transitions", as_list(transitions))
    own, members = _own_response(result), _own_members(result)
    if accounts:
        accounts += [account for one in members for account in _read(one)[0]]
        scored = [passage for one in own for passage in _read(one)[1]]
    else:
        read = [_read(one) for one in (*own, *members)]
        accounts = [account for told, _ in read for account in told]
        scored = [passage for _, passages in read for passage in passages]
    references = _references(result.get("ng_trajectory"))
    shown = any(passage.runs for account in accounts for passage in account.passages)
    if not shown and not references:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    return ReturnedHistory(tuple(accounts) if shown else (), tuple(scored), references)


def read_response(response: object) -> tuple[Passage, ...]:
    """Read a response where it is a witness alone: in Responses or Chat shape, or a list of items.

    Returns:
        It, once for each member that tells it; once if none does. Of a member that cannot be read
        only the id of the response is left, which is a witness of its own.
    """
    return _witnesses([("", one) for one in tellings(response)])


def own_response(result: object) -> tuple[Passage, ...]:
    """Read a result's own response where it is a witness alone, as `read_response` does.

    `output` and `choices` of the result tell it too, unless they stand beside a history.
    """
    if not isinstance(result, dict):
        return ()
    is_told_apart = any(result.get(name) is not None for name in _HISTORIES)
    members = [] if is_told_apart else _own_members(result)
    return _witnesses([*_own_response(result), *members])


_Named: TypeAlias = tuple[str, Telling]
"""A telling, and the name of the account that it makes."""


def _own_response(result: dict[str, object]) -> list[_Named]:
    """Give what is told of a result's own response, in `response`."""
    response = result.get("response")
    told = [] if response is None else tellings(response)
    return [(".".join(filter(None, ("response", one.member))), one) for one in told]


def _own_members(result: dict[str, object]) -> list[_Named]:
    """Give what `output` and `choices` of a result itself tell."""
    is_alone = all(result.get(name) is None for name in ("response", *_HISTORIES, "ng_trajectory"))
    return [(one.member or "", one) for one in members_of(result, is_alone=is_alone)]


def _read(named: _Named) -> tuple[list[Account], list[Passage]]:
    """Give the accounts that a telling of a response makes, and the response as it tells it."""
    name, one = named
    items = one.items
    if any(isinstance(item, list) for item in items):
        snapshots = _snapshots(name, items)
        ends = [last for account in snapshots for last in account.passages[-1:]]
        return snapshots, [*ends, Passage((), one.response_id)]
    passage = _passage(items, one.response_id)
    return ([] if one.member is None else [Account(name, (passage,))]), [passage]


def _witnesses(told: Sequence[_Named]) -> tuple[Passage, ...]:
    """Read tellings each apart, so that one that cannot be read silences no other."""
    passages: list[Passage] = []
    for named in told:
        try:
            passages += _read(named)[1]
        except SelectionRefusedError:
            passages.append(Passage((), named[1].response_id))
    return tuple(passages)


def _snapshots(name: str, transitions: Sequence[object]) -> list[Account]:
    """Read snapshots; what one shows again of the one before it is not read twice."""
    accounts: list[Account] = []
    for way, told in _named(name, _readings([_snapshot(one) for one in transitions])):
        passages: list[Passage] = []
        before: list[object] = []
        for items, response_id in ((one.items, one.response_id) for one in told):
            known = len(before) if items[: len(before)] == before else 0
            passage = _passage(items[known:], response_id)
            if not passage.runs:
                passage = replace(passage, again=_passage(items, "").runs)
            passages.append(passage)
            before = items
        accounts.append(Account(way, tuple(passages), repeats=True))
    return accounts


def _snapshot(transition: object) -> list[list[Telling]]:
    """Give the responses of one transition, once for each way in which it tells them."""
    if isinstance(transition, list):
        return [[Telling("", transition, "")]]
    if not isinstance(transition, dict):
        raise unreadable("a transition is no object")
    several, one = transition.get("responses"), transition.get("response")
    held = [] if several is None else list(as_list(several))
    if one is not None:
        held.append(one)
    is_alone = several is None and one is None
    ways = [[own] for own in members_of(transition, is_alone=is_alone)]
    if not is_alone:
        parts = [[[telling] for telling in tellings(response)] for response in held]
        ways = [*_readings(parts), *ways]
    return ways or [[]]


def _readings(parts: Sequence[Sequence[Sequence[Telling]]]) -> list[list[Telling]]:
    """Give the ways to read parts in order; each way to tell a part is in one of them.

    Args:
        parts: each as the ways in which it is told, at least one.
    """
    count = max((len(ways) for ways in parts), default=1)
    return [
        [telling for ways in parts for telling in ways[min(way, len(ways) - 1)]]
        for way in range(count)
    ]


def _named(name: str, readings: Sequence[list[Telling]]) -> list[tuple[str, list[Telling]]]:
    return [(f"{name} ({way})" if way > 1 else name, told) for way, told in enumerate(readings, 1)]


def _passage(items: Sequence[object], response_id: str) -> Passage:
    runs: list[tuple[ShownItem, ...]] = []
    run: list[ShownItem] = []
    for item in items:
        shown = _shown(item)
        if shown is not None:
            run.append(shown)
        elif run:
            runs.append(tuple(run))
            run = []
    if run:
        runs.append(tuple(run))
    return Passage(tuple(runs), response_id)


def _shown(item: object) -> ShownItem | None:
    """Give an item that a model wrote, one that says nothing too; None for another's."""
    try:
        read = item_atoms(item)
    except UnreadableItemError as error:
        if _is_observation(item):
            return None
        raise unreadable(error.fact) from error
    if read.spelling is None:
        return None
    given = item.get("id") if isinstance(item, dict) else None
    return ShownItem(item, (given,) if isinstance(given, str) and given else ())


def _is_observation(item: object) -> bool:
    """Say whether an item is no model's, whatever it holds."""
    return isinstance(item, dict) and (
        item.get("role") in _OBSERVATION_ROLES or item.get("type") in _OBSERVATION_TYPES
    )


def _references(trajectory: object) -> tuple[Reference, ...] | None:
    if trajectory is None:
        return None
    turns = trajectory.get("turns") if isinstance(trajectory, dict) else None
    if not isinstance(turns, list):
        raise unreadable("ng_trajectory has no list of turns")
    found: list[Reference] = []
    referring = False
    for turn in turns:
        if not isinstance(turn, dict):
            raise unreadable("a turn of ng_trajectory is no object")
        calls = turn.get("model_calls")
        referring |= calls is not None
        found += [_reference(call) for call in ([] if calls is None else as_list(calls))]
    return tuple(found) if referring else None


def _reference(call: object) -> Reference:
    if isinstance(call, str) and call:
        return Reference((call,))
    if isinstance(call, dict):
        given = [call[key] for key in _REFERENCE_KEYS if call.get(key) is not None]
        given = given or [call.get("id")]
        names = [name for name in given if isinstance(name, str) and name]
        if len(names) == len(given):
            return Reference(tuple(names))
    raise unreadable("a model call of ng_trajectory has no id")
