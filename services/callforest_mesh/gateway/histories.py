"""The histories of served calls, in memory: for delta requests, and to say what a request changed.

A kept call holds only what its request added to the request of an earlier one, and its answer: what
an attempt takes grows with its new items, however often its history comes again. Bounded in bytes
and in calls. Of what was used longest ago the newest calls go first, since the others hold up later
ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from callforest_core.lineage.items import Dialect
from callforest_core.lineage.source import SourceHistory
from callforest_mesh.gateway.body_start import BodyStart, Prefixes, longest_start

_CALL_BYTES: Final = 2048
"""What a kept call costs beside its turns, roughly: its objects, digests and keys."""
_STARTS_MAX: Final = 64
"""So many of an attempt's calls a body is held against: its conversations at one time."""
_STRETCH: Final = 16
"""Every so many calls of a chain that deltas build, their messages are joined once."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Turns of a conversation, written as JSON: values with commas between them.

    Attributes:
        items: as their harness sent or got them.
        messages: as the engine takes them, in Chat's form; the same bytes where the forms agree.
        count: how many items these are.
    """

    items: bytes
    messages: bytes
    count: int

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return len(self.items) + (len(self.messages) if self.messages is not self.items else 0)


@dataclass(frozen=True, slots=True, eq=False)
class RenderOptions:
    """What decides, beside its turns, how a request becomes tokens.

    Attributes:
        digest: 32 bytes.
        values: the options that are set, a JSON object.
        instructions: system text that stands outside of the turns; None without.
    """

    digest: bytes
    values: bytes
    instructions: str | None

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return len(self.values) + len(self.instructions or "")


@dataclass(slots=True, eq=False)
class KeptCall:
    """One served call.

    Attributes:
        capture_key: its attempt.
        call_id: itself.
        dialect: the API in which it was made.
        parent: the call with whose request this one's begins; None when it stands alone.
        asked: the turns of its request behind those of the parent's.
        answer: the turns of its answer.
        request_history: its request's atoms, digested.
        history: the atoms of request and answer, digested.
        options: of its rendering; the parent's own where they are equal.
        start: the bytes with which its request began, up to the end of its last turn; None of a
            delta request, which no whole one begins with.
        turn_count: how many turns its whole request has.
        depth: how many calls its chain has before it.
        stretch: the messages of the last calls of its chain, joined; None when they are not.
        child_count: how many kept calls have it as parent.
    """

    capture_key: str
    call_id: str
    dialect: Dialect
    parent: KeptCall | None
    asked: Turns
    answer: Turns
    request_history: SourceHistory
    history: SourceHistory
    options: RenderOptions
    start: BodyStart | None = None
    turn_count: int = field(init=False)
    depth: int = field(init=False)
    stretch: _Stretch | None = field(init=False, default=None)
    child_count: int = field(init=False, default=0)
    # None of the first call itself, which would keep itself alive.
    _root: KeptCall | None = field(init=False)

    def __post_init__(self) -> None:
        """Place the call in its chain."""
        parent = self.parent
        self._root = parent.root if parent else None
        self.turn_count = self.asked.count + (parent.turn_count if parent else 0)
        self.depth = parent.depth + 1 if parent else 0
        if self.start is None and self.depth % _STRETCH == _STRETCH - 1:
            self.stretch = _stretch_to(self)

    @property
    def root(self) -> KeptCall:
        """The first call of its chain."""
        return self if self._root is None else self._root

    @property
    def size_bytes(self) -> int:
        """What it takes, without what it shares with its parent."""
        options = self.options
        shared = self.parent is not None and self.parent.options is options
        own = 0 if shared else options.size_bytes
        joined = len(self.stretch.messages) if self.stretch else 0
        return _CALL_BYTES + self.asked.size_bytes + self.answer.size_bytes + own + joined

    def parts(self) -> list[Turns]:
        """Give the turns of request and answer, in order."""
        return [*self.request_parts(), self.answer]

    def request_parts(self) -> list[Turns]:
        """Give the turns of the request, in order: one part a call of its chain."""
        return [call.asked for call in self._chain(self.depth + 1)]

    def messages(self) -> list[bytes]:
        """Give the messages of request and answer, as the engine takes them, in few parts."""
        return [*self.request_messages(), self.answer.messages]

    def request_messages(self) -> list[bytes]:
        """Give the messages of the request, as the engine takes them, in few parts."""
        parts: list[bytes] = []
        call: KeptCall | None = self
        while call is not None:
            if call.stretch is not None:
                parts.append(call.stretch.messages)
                call = call.stretch.before
            else:
                parts.append(call.asked.messages)
                call = call.parent
        parts.reverse()
        return parts

    def _chain(self, count: int) -> list[KeptCall]:
        """Give the last calls of the chain, this one the last."""
        calls: list[KeptCall] = []
        call: KeptCall | None = self
        while call is not None and len(calls) < count:
            calls.append(call)
            call = call.parent
        calls.reverse()
        return calls


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Some calls of a chain: their requests' messages, joined, and the call before them."""

    messages: bytes
    before: KeptCall | None


def _stretch_to(last: KeptCall) -> _Stretch:
    calls = last._chain(_STRETCH)  # noqa: SLF001 - of this module
    messages = b",".join([call.asked.messages for call in calls])
    return _Stretch(messages, calls[0].parent)


class Histories:
    """Keeps the calls that were used last, of all attempts.

    Args:
        bytes_max: what all of them may take; a call that is larger alone is not kept.
        calls_max: how many they may be.
    """

    def __init__(self, bytes_max: int, calls_max: int) -> None:
        self._bytes_max = bytes_max
        self._calls_max = calls_max
        self._bytes = 0
        self._attempts: dict[str, dict[str, KeptCall]] = {}
        self._count = 0
        self._leaves: OrderedDict[KeptCall, None] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """What the kept calls take now."""
        return self._bytes

    def get(self, capture_key: str, call_id: str) -> KeptCall | None:
        """Give a call, and count it as used."""
        call = self._attempts.get(capture_key, {}).get(call_id)
        return None if call is None else self._used(call)

    def recent(self, capture_key: str, count: int) -> list[KeptCall]:
        """Give so many calls of an attempt, those that were kept last."""
        calls = self._attempts.get(capture_key, {})
        return list(islice(reversed(calls.values()), count))

    def begun(
        self, capture_key: str, dialect: Dialect, body: bytes, prefixes: Prefixes
    ) -> KeptCall | None:
        """Give the call with whose turns a body begins and goes on, and count it as used.

        It is the longest of the attempt's calls that were kept last.
        """
        recent = reversed(self.recent(capture_key, _STARTS_MAX))
        starts = {call.start: call for call in recent if call.start and call.dialect is dialect}
        start = longest_start(body, starts, prefixes)
        return None if start is None else self._used(starts[start])

    def keep(self, call: KeptCall) -> None:
        """Keep a call; what was used longest ago makes room.

        A call whose parent is no longer kept is not kept either, nor is one that is kept already.
        """
        if self._is_kept(call) or not (call.parent is None or self._is_kept(call.parent)):
            return
        size = call.size_bytes
        if size > self._bytes_max or not self._calls_max:
            return
        if call.parent is not None:
            call.parent.child_count += 1
            self._leaves.pop(call.parent, None)
        while self._bytes + size > self._bytes_max or self._count >= self._calls_max:
            if not self._leaves:  # nothing but what this call stands on
                self._release_parent(call)
                return
            self._drop(next(iter(self._leaves)))
        self._attempts.setdefault(call.capture_key, {})[call.call_id] = call
        self._leaves[call] = None
        self._bytes += size
        self._count += 1

    def newest_of_roots(self, capture_key: str, count: int) -> list[KeptCall]:
        """Give of each root of an attempt the call that was kept last; so many, the last first."""
        newest: dict[KeptCall, KeptCall] = {}
        for call in self.recent(capture_key, self._count):
            if call.root not in newest:
                newest[call.root] = call
                if len(newest) == count:
                    break
        return list(newest.values())

    def ends_of(self, root: KeptCall, count: int) -> list[KeptCall]:
        """Give the calls of a root that no kept call goes on from; so many, the last first.

        Of all calls of a root, what was asked is part of what these asked; not what they answered.
        """
        calls = self.recent(root.capture_key, self._count)
        ends = (call for call in calls if call.root is root and not call.child_count)
        return list(islice(ends, count))

    def _is_kept(self, call: KeptCall) -> bool:
        return call.call_id in self._attempts.get(call.capture_key, {})

    def _used(self, call: KeptCall) -> KeptCall:
        if call in self._leaves:
            self._leaves.move_to_end(call)
        return call

    def _drop(self, call: KeptCall) -> None:
        del self._leaves[call]
        calls = self._attempts[call.capture_key]
        del calls[call.call_id]
        if not calls:
            del self._attempts[call.capture_key]
        self._bytes -= call.size_bytes
        self._count -= 1
        self._release_parent(call)

    def _release_parent(self, call: KeptCall) -> None:
        """Let the parent go next when nothing stands on it any more."""
        parent = call.parent
        if parent is None:
            return
        parent.child_count -= 1
        if not parent.child_count:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
