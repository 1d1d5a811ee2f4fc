"""What harnesses of forest mode know of their own requests: what the judges hold the mesh against.

Nothing here is asked of a service: a call's name follows from its key, what it continues from what
was said before in its attempt.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.robustness.chaos_edges import Said


@dataclass(slots=True)
class AskedCall:
    """One logical request.

    Attributes:
        call_id: what its key makes it.
        history: names all that was asked up to its last answer; b"" when it holds none.
        meant: the call whose answer is the last that is shown; "" when none is. It decides when
            another call ends the same history.
        is_delta: whether only what is new was sent.
        said: the answer; None as long as there is none.
        ends: names all that was asked and answered; b"" without an answer.
        accepted: whether the harness went on from the answer.
        given_up: whether the harness asked otherwise, not knowing what became of this.
    """

    call_id: str
    history: bytes
    meant: str = ""
    is_delta: bool = False
    said: Said | None = None
    ends: bytes = b""
    accepted: bool = False
    given_up: bool = False


@dataclass(slots=True)
class Account:
    """The requests of one attempt, in the order in which they were made.

    Attributes:
        capture_key: the attempt.
        asked: all of them.
    """

    capture_key: str
    asked: list[AskedCall] = field(default_factory=list)

    @property
    def accepted(self) -> list[AskedCall]:
        """The requests whose answers the harness went on from."""
        return [one for one in self.asked if one.accepted]

    @property
    def answered(self) -> list[AskedCall]:
        """The requests that were answered, those whose answers were rejected too."""
        return [one for one in self.asked if one.said is not None]

    def texts(self) -> dict[tuple[str, str], str]:
        """Give what each answer said, by attempt and call."""
        return {(self.capture_key, one.call_id): one.said.text for one in self.asked if one.said}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a rollout was finished with, and what follows from it.

    Attributes:
        capture_key: the attempt.
        policy: what selects.
        call_ids: what it must select, in order; None for every call that has a record.
        terminal_call_id: the scored call.
    """

    capture_key: str
    policy: str
    call_ids: tuple[str, ...] | None
    terminal_call_id: str


def told(messages: Sequence[Mapping[str, object]]) -> bytes:
    """Name what a conversation says; ids that its messages carry do not count."""
    said = [[message["role"], message["content"]] for message in messages]
    return hashlib.sha256(json.dumps(said).encode()).digest()


def history_of(messages: Sequence[Mapping[str, object]]) -> bytes:
    """Name a conversation up to its last answer; b"" when it holds none."""
    ends = [place for place, one in enumerate(messages, 1) if one["role"] == "assistant"]
    return told(messages[: ends[-1]]) if ends else b""


def call_id_of(capture_key: str, key: str) -> str:
    """Name the call that a key makes (docs/protocol.md, section 7c)."""
    made = hashlib.sha256(b"callforest-call-id-v1")
    for part in (capture_key.encode(), key.encode()):
        made.update(struct.pack(">Q", len(part)) + part)
    return f"k{made.hexdigest()[:40]}"
