"""What a harness returns of a rollout: the answers that it accepted, as its result shows them.

A result shows answers whole and in order, as `response.output` (or `output`), an ordered list
`responses`, snapshots in `transitions`, or as references in `ng_trajectory.turns[].model_calls`.
Here they are only read; `answers` says which calls they are. Nothing is guessed: what cannot be
read is refused. Nothing is passed over either: a response that is told twice, by `output` and by
`choices` say, makes two accounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from callforest_core.forest.selection import SelectionFault, SelectionRefusedError
from callforest_core.lineage.atoms import item_atoms
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Dialect, ItemsError, response_items

_OBSERVATION_ROLES: Final = frozenset({"user", "system", "developer", "tool"})
_OBSERVATION_TYPES: Final = frozenset({"function_call_output"})
_REFERENCE_KEYS: Final = ("model_call_id", "call_id", "response_id")


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
            other accounts they are the accounts; they must agree with each other in any case.
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
        raise _unreadable("the result is no object")
    accounts: list[Account] = []
    if (responses := result.get("responses")) is not None:
        parts = [[[one] for one in _tellings(response)] for response in _list(responses)]
        for name, told in _named("responses", _readings(parts)):
            accounts.append(Account(name, tuple(_passage(*one.shown) for one in told)))
    if (transitions := result.get("transitions")) is not None:
        accounts += _snapshots("transitions", _list(transitions))
    own, scored = _own_accounts(result)
    accounts = accounts or own
    references = _references(result.get("ng_trajectory"))
    shown = any(passage.runs for account in accounts for passage in account.passages)
    if not shown and not references:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    return ReturnedHistory(tuple(accounts) if shown else (), scored, references)


def read_response(response: object) -> tuple[Passage, ...]:
    """Read one response in Responses or Chat shape, or a bare list of items.

    Returns:
        It, once for each member that tells it; once if none does.

    Raises:
        SelectionRefusedError: `history_unreadable`.
    """
    return tuple(_passage(*one.shown) for one in _tellings(response))


def own_response(result: object) -> tuple[Passage, ...]:
    """Read a result's own response, once for each member of the result that tells it.

    Raises:
        SelectionRefusedError: `history_unreadable`.
    """
    return _own_accounts(result)[1] if isinstance(result, dict) else ()


class _Telling(NamedTuple):
    """What one member tells of a response.

    Attributes:
        member: its name, "" for a bare list; None when nothing is told.
        items: what it holds.
        response_id: the id of the response as a whole, or "".
    """

    member: str | None
    items: list[object]
    response_id: str

    @property
    def shown(self) -> tuple[list[object], str]:
        """The items and the id."""
        return self.items, self.response_id


def _own_accounts(result: dict[str, object]) -> tuple[list[Account], tuple[Passage, ...]]:
    """Give the accounts that a result's own response makes, and the response as each tells it."""
    response = result.get("response")
    told = [] if response is None else _tellings(response)
    named = [(".".join(filter(None, ("response", one.member))), one) for one in told]
    named += [(one.member or "", one) for one in _members(result)]
    accounts: list[Account] = []
    passages: list[Passage] = []
    for name, one in named:
        if any(isinstance(item, list) for item in one.items):
            snapshots = _snapshots(name, one.items)
            accounts += snapshots
            passages += [last for account in snapshots for last in account.passages[-1:]]
            passages.append(Passage((), one.response_id))
            continue
        passages.append(_passage(*one.shown))
        if one.member is not None:
            accounts.append(Account(name, (passages[-1],)))
    return accounts, tuple(passages)


def _snapshots(name: str, transitions: Sequence[object]) -> list[Account]:
    """Read snapshots; what one shows again of the one before it is not read twice."""
    accounts: list[Account] = []
    for way, told in _named(name, _readings([_snapshot(one) for one in transitions])):
        passages: list[Passage] = []
        before: list[object] = []
        for items, response_id in (one.shown for one in told):
            known = len(before) if items[: len(before)] == before else 0
            passage = _passage(items[known:], response_id)
            if not passage.runs:
                passage = replace(passage, again=_passage(items, "").runs)
            passages.append(passage)
            before = items
        accounts.append(Account(way, tuple(passages), repeats=True))
    return accounts


def _snapshot(transition: object) -> list[list[_Telling]]:
    """Give the responses of one transition, once for each way in which it tells them."""
    if isinstance(transition, list):
        return [[_Telling("", transition, "")]]
    if not isinstance(transition, dict):
        raise _unreadable("a transition is no object")
    several, one = transition.get("responses"), transition.get("response")
    held = [] if several is None else list(_list(several))
    if one is not None:
        held.append(one)
    ways = [[own] for own in _members(transition)]
    if several is not None or one is not None:
        parts = [[[telling] for telling in _tellings(response)] for response in held]
        ways = [*_readings(parts), *ways]
    return ways or [[]]


def _readings(parts: Sequence[Sequence[Sequence[_Telling]]]) -> list[list[_Telling]]:
    """Give the ways to read parts in order; each way to tell a part is in one of them.

    Args:
        parts: each as the ways in which it is told, at least one.
    """
    count = max((len(ways) for ways in parts), default=1)
    return [
        [telling for ways in parts for telling in ways[min(way, len(ways) - 1)]]
        for way in range(count)
    ]


def _named(name: str, readings: Sequence[list[_Telling]]) -> list[tuple[str, list[_Telling]]]:
    return [(f"{name} ({way})" if way > 1 else name, told) for way, told in enumerate(readings, 1)]


def _tellings(response: object) -> list[_Telling]:
    """Give what is told of one response: by each of its members, or that nothing is."""
    if isinstance(response, list):
        return [_Telling("", response, "")]
    if not isinstance(response, dict):
        raise _unreadable("a response is no object")
    return _members(response) or [_Telling(None, [], _id_of(response))]


def _members(holder: dict[str, object]) -> list[_Telling]:
    """Give what `output` and `choices` tell, if they are there."""
    found: list[_Telling] = []
    if (output := holder.get("output")) is not None:
        found.append(_Telling("output", _list(output), _id_of(holder)))
    if holder.get("choices") is not None:
        try:
            items = list(response_items(holder, Dialect.CHAT))
        except ItemsError as error:
            raise _unreadable(error.fact) from error
        found.append(_Telling("choices", list[object](items), _id_of(holder)))
    return found


def _id_of(holder: dict[str, object]) -> str:
    given = holder.get("id")
    return given if isinstance(given, str) else ""


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
        raise _unreadable(error.fact) from error
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
        raise _unreadable("ng_trajectory has no list of turns")
    found: list[Reference] = []
    referring = False
    for turn in turns:
        if not isinstance(turn, dict):
            raise _unreadable("a turn of ng_trajectory is no object")
        calls = turn.get("model_calls")
        referring |= calls is not None
        found += [_reference(call) for call in ([] if calls is None else _list(calls))]
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
    raise _unreadable("a model call of ng_trajectory has no id")


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise _unreadable(f"{type(value).__name__} where a list belongs")
    return value


def _unreadable(detail: str) -> SelectionRefusedError:
    return SelectionRefusedError(SelectionFault.HISTORY_UNREADABLE, detail)
