"""Attempts and calls as the model of the mesh knows them: conversations are texts here."""

from __future__ import annotations

from dataclasses import dataclass, field

from callforest.capture.v1 import capture_admission_pb2

Messages = list[dict[str, str]]
WITHOUT_COORDINATES = "request_finished_without_staged_coordinates"


@dataclass(slots=True)
class ModelCall:
    """A call as the model knows it.

    Attributes:
        owner: the attempt that it is staged under, when that is another one.
    """

    verdict: capture_admission_pb2.Verdict
    messages: Messages
    record: bool = False
    withdrawn: bool = False
    parent: str = ""
    failures: set[str] = field(default_factory=set)
    owner: str = ""


@dataclass(slots=True)
class ModelAttempt:
    """An attempt as the model knows it.

    Attributes:
        calls: by their ids.
        announced: theirs, in the order in which they were announced; restored ones as they were.
        conversations: committed calls by what had been said when they ended: by models in chain
            mode, by anyone in forest mode.
        order: committed calls, first to last; restored ones first.
        told_at: what had been said when a committed call ended.
    """

    rollout_id: str
    number: int
    capture_key: str
    forest: bool = False
    revision: int = 1
    state: str = "open"
    calls: dict[str, ModelCall] = field(default_factory=dict)
    announced: list[str] = field(default_factory=list)
    conversations: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    told_at: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def commit(self, call_id: str, said: tuple[str, ...]) -> None:
        """Let a call be continued by what had been said when it ended."""
        self.order.append(call_id)
        self.told_at[call_id] = said
        self.conversations.setdefault(said, []).append(call_id)

    def announce(self, call_id: str) -> None:
        """Take note of an intent; a withdrawn call that is announced again comes last."""
        if call_id in self.announced:
            self.announced.remove(call_id)
        self.announced.append(call_id)

    @property
    def lost(self) -> bool:
        """Whether answers were served that were not captured."""
        return any(call.failures - {WITHOUT_COORDINATES} for call in self.calls.values())

    @property
    def pending(self) -> list[str]:
        return [
            one
            for one, call in self.calls.items()
            if not (call.record or call.failures or call.withdrawn)
        ]

    @property
    def failed(self) -> bool:
        """Whether a failure masks it, whatever is selected (LED-9)."""
        return any(
            call.failures - ({WITHOUT_COORDINATES} if self.forest and call.record else set())
            for call in self.calls.values()
        )

    def owner_of(self, call_id: str) -> str:
        """Give the attempt that a call is staged under."""
        call = self.calls.get(call_id)
        return (call.owner if call is not None else "") or self.capture_key

    def said(self, messages: Messages) -> tuple[str, ...]:
        """Give what a conversation is known by."""
        if self.forest:
            return tuple(f"{one['role']}: {one['content']}" for one in messages)
        return tuple(one["content"] for one in messages if one["role"] == "assistant")


@dataclass(slots=True)
class Sampled:
    """One generation of a call."""

    tokens: bytes
    response: bytes
    weight_version: int
