"""What the members of a response tell: its answers as items, or nothing that is one.

A response tells its answers in `output` or in `choices`, or in both. What only has such a name, as
the choices of a question have, is no telling beside answers; alone it cannot be read.
"""

from __future__ import annotations

from typing import NamedTuple

from callforest_core.forest.selection import SelectionFault, SelectionRefusedError
from callforest_core.lineage.items import Dialect, ItemsError, response_items


class Telling(NamedTuple):
    """What one member tells of a response.

    Attributes:
        member: its name, "" for a response that is no object; None when nothing is told.
        held: what it holds, as JSON.
        response_id: the id of the response as a whole, or "".
    """

    member: str | None
    held: object
    response_id: str

    @property
    def items(self) -> list[object]:
        """What it holds, as items.

        Raises:
            SelectionRefusedError: `history_unreadable`; so it is only when items are asked for.
        """
        if self.member != "choices":
            return as_list(self.held)
        if not _are_answers("choices", self.held):
            raise unreadable("choices hold no messages")
        try:
            return [*response_items({"choices": self.held}, Dialect.CHAT)]
        except ItemsError as error:
            raise unreadable(error.fact) from error


def tellings(response: object) -> list[Telling]:
    """Give what is told of one response: by each of its members, or that nothing is."""
    if not isinstance(response, dict):
        return [Telling("", response, "")]
    return members_of(response, is_alone=True) or [Telling(None, [], _id_of(response))]


def members_of(holder: dict[str, object], *, is_alone: bool) -> list[Telling]:
    """Give what `output` and `choices` tell, if they are there.

    Args:
        holder: a response, a transition, or a result.
        is_alone: whether nothing else of it shows answers. A member that does not have the shape
            of answers is a telling only where none other is, and cannot be read.
    """
    told = [
        Telling(member, holder[member], _id_of(holder))
        for member in ("output", "choices")
        if holder.get(member) is not None
    ]
    answers = [one for one in told if _are_answers(one.member, one.held)]
    return answers or (told if is_alone else [])


def as_list(value: object) -> list[object]:
    """Give a list as it is; raises SelectionRefusedError for what is none."""
    if not isinstance(value, list):
        raise unreadable(f"{type(value).__name__} where a list belongs")
    return value


def unreadable(detail: str) -> SelectionRefusedError:
    """Make the fault of a result that cannot be read."""
    return SelectionRefusedError(SelectionFault.HISTORY_UNREADABLE, detail)


def _are_answers(member: str | None, held: object) -> bool:
    """Say whether what a member holds has the shape of answers, or of snapshots of them."""
    if not isinstance(held, list):
        return False
    if member == "choices":
        return all(isinstance(one, dict) and _is_message(one.get("message", "")) for one in held)
    parts = [item for one in held for item in (one if isinstance(one, list) else [one])]
    return all(isinstance(item, dict) for item in parts)


def _is_message(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _id_of(holder: dict[str, object]) -> str:
    given = holder.get("id")
    return given if isinstance(given, str) else ""
