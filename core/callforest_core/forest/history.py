"""What a harness returns of a rollout: the answers that it accepted, as its result shows them.

A result shows answers whole and in order, as `response.output` (or `output`), an ordered list
`responses`, snapshots in `transitions`, or as references in `ng_trajectory.turns[].model_calls`.
Here they are only read; `answers` says which calls they are. Nothing is guessed: what cannot be
read is refused.
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
        response: the scored response as the result has it, or None. Without another account it
            is the account.
        references: calls named one by one, or None when the result has no trajectory.
    """

    accounts: tuple[Account, ...]
    response: Passage | None
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
    accounts = []
    if (responses := result.get("responses")) is not None:
        accounts.append(Account("responses", tuple(map(read_response, _list(responses)))))
    if (transitions := result.get("transitions")) is not None:
        accounts.append(_snapshots("transitions", _list(transitions)))
    response, own = _own_response(result)
    if not accounts and own is not None:
        accounts.append(own)
    references = _references(result.get("ng_trajectory"))
    shown = any(passage.runs for account in accounts for passage in account.passages)
    if not shown and not references:
        raise SelectionRefusedError(SelectionFault.HISTORY_MISSING, "it shows no answer")
    return ReturnedHistory(tuple(accounts) if shown else (), response, references)


def read_response(response: object) -> Passage:
    """Read one response in Responses or Chat shape, or a bare list of items.

    Raises:
        SelectionRefusedError: `history_unreadable`.
    """
    return _passage(*_items_of(response))


def _own_response(result: dict[str, object]) -> tuple[Passage | None, Account | None]:
    """Give the result's own response, and the account that its output is."""
    response = result.get("response")
    holder = response if isinstance(response, dict) else result
    output = holder.get("output")
    if isinstance(output, list) and any(isinstance(one, list) for one in output):
        account = _snapshots("response.output", output)
        return (account.passages[-1] if account.passages else None), account
    if response is None and output is None and "choices" not in result:
        return None, None
    own = read_response(holder if response is None or holder is response else response)
    return own, Account("response.output", (own,))


def _snapshots(name: str, transitions: Sequence[object]) -> Account:
    """Read snapshots; what one shows again of the one before it is not read twice."""
    passages: list[Passage] = []
    before: list[object] = []
    for transition in transitions:
        for items, response_id in _snapshot(transition):
            known = len(before) if items[: len(before)] == before else 0
            passage = _passage(items[known:], response_id)
            if not passage.runs:
                passage = replace(passage, again=_passage(items, "").runs)
            passages.append(passage)
            before = items
    return Account(name, tuple(passages), repeats=True)


def _snapshot(transition: object) -> list[tuple[list[object], str]]:
    """Give the items of the responses of one transition, each with its id."""
    if isinstance(transition, list):
        return [(transition, "")]
    if not isinstance(transition, dict):
        raise _unreadable("a transition is no object")
    several = transition.get("responses")
    one = transition.get("response")
    found = [] if several is None else list(_list(several))
    if one is not None:
        found.append(one)
    if several is None and one is None and "output" in transition:
        found.append(transition)
    return [_items_of(response) for response in found]


def _items_of(response: object) -> tuple[list[object], str]:
    if isinstance(response, list):
        return response, ""
    if not isinstance(response, dict):
        raise _unreadable("a response is no object")
    given = response.get("id")
    response_id = given if isinstance(given, str) else ""
    if "output" not in response and "choices" in response:
        try:
            return list(response_items(response, Dialect.CHAT)), response_id
        except ItemsError as error:
            raise _unreadable(error.fact) from error
    output = response.get("output")
    return ([] if output is None else _list(output)), response_id


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
