"""How the attempts of a rollout are named (docs/protocol.md, "Identities")."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_LATER: Final = re.compile(r"(?P<rollout>.+)-a(?P<number>[1-9][0-9]*)", re.DOTALL)


class AttemptName(NamedTuple):
    """What a capture key says.

    Attributes:
        rollout_id: the logical rollout.
        number: of the attempt, from 0.
    """

    rollout_id: str
    number: int

    @property
    def capture_key(self) -> str:
        """The attempt's name: the rollout's id, from the second on with the number behind it."""
        return self.rollout_id if self.number == 0 else f"{self.rollout_id}-a{self.number}"

    @property
    def earlier(self) -> list[str]:
        """The names of the rollout's attempts before this one, first to last."""
        return [AttemptName(self.rollout_id, number).capture_key for number in range(self.number)]


def attempt_name(capture_key: str) -> AttemptName:
    """Read a capture key."""
    later = _LATER.fullmatch(capture_key)
    if later is None:
        return AttemptName(capture_key, 0)
    return AttemptName(later["rollout"], int(later["number"]))


def is_earlier_attempt(earlier: str, capture_key: str) -> bool:
    """Say whether one capture key names an earlier attempt of the other's rollout."""
    first, second = attempt_name(earlier), attempt_name(capture_key)
    return first.rollout_id == second.rollout_id and first.number < second.number


def may_own_parent(owner: str, capture_key: str, *, has_parent: bool) -> bool:
    """Say whether an attempt's call may name this owner of its parent; "" is the attempt itself."""
    return not owner or (has_parent and is_earlier_attempt(owner, capture_key))
