"""Source histories: what a request says, in constant size (docs/lineage.md, section 11).

A history is a chained digest over the atoms of a conversation, with the ends of its last answers.
It grows by new items without reading the old ones again, and two histories are equal exactly when
their counts and digests are.

    s_0 = H("callforest-source-v3")              s_i = H("callforest-source-v3" s_{i-1} LP(atom i))
    t_0 = H("callforest-tool-content-v1")
    t_j = H("callforest-tool-content-v1" t_{j-1} u8(spelling))
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.answer_atoms import Spelling
from callforest_core.lineage.atom import NOTHING_SAID, SAYING_KINDS, AtomKind
from callforest_core.lineage.atoms import is_user_message, item_atoms, plain_atom
from callforest_core.lineage.canonical_json import canonical_json
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Dialect, Item

SOURCE_VERSION: Final = 3
"""The normalization version; records of another are never continued."""
BOUNDARIES_MAX: Final = 8
"""Most answer ends that a history remembers and a probe carries, the last ones."""
NATIVE_IDS_MAX: Final = 64
NATIVE_ID_LENGTH_MAX: Final = 256

_SOURCE_DOMAIN: Final = b"callforest-source-v3"
_SPELLING_DOMAIN: Final = b"callforest-tool-content-v1"
_RENDER_DOMAIN: Final = b"callforest-render-v2"
_NO_SOURCE: Final = hashlib.sha256(_SOURCE_DOMAIN).digest()
_NO_SPELLING: Final = hashlib.sha256(_SPELLING_DOMAIN).digest()
_SOURCE_OPTIONS: Final[Mapping[str, object]] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "model": None,
    "reasoning_effort": None,
    "tools": None,
}
"""The options that count in forest mode, by what an absent one stands for."""
_EMPTY: Final[tuple[object, ...]] = ([], {})


@dataclass(frozen=True, slots=True)
class SourceBoundary:
    """The end of an answer: the atoms up to there, and two 32-byte digests of them."""

    atom_count: int
    source_digest: bytes
    tool_content_digest: bytes


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What a record keeps of request and answer; digests are 32 bytes.

    `tool_content_digest` tells how answers without text spell that.
    """

    atom_count: int
    source_digest: bytes
    tool_content_digest: bytes
    render_digest: bytes
    normalization_version: int = SOURCE_VERSION

    @property
    def key(self) -> tuple[int, bytes]:
        """By which a boundary finds the record."""
        return self.atom_count, self.source_digest


@dataclass(frozen=True, slots=True)
class OutputSummary:
    """What identifies an answer: its number of atoms and their chained 32-byte digest."""

    atom_count: int
    digest: bytes
    normalization_version: int = SOURCE_VERSION


@dataclass(frozen=True, slots=True)
class SourceProbe:
    """What the ledger is asked about a request; its size does not grow with the history.

    Attributes:
        atom_count: of the request.
        boundaries: the ends of its last answers, longest first.
        observations_follow: whether user messages and tool results alone follow the first
            boundary, and at least one.
        render_digest: 32 bytes, of the effective options of the rendering.
        native_ids: ids that the items of the last answer echo.
        claimed_call_id: the call that the request says it continues.
        normalization_version: the rules that made the atoms.
        claim_breaks_ties: the history came whole, and the claim only chooses among equals.
        has_unreadable_item: an item has no normal form; there are no boundaries then.
    """

    atom_count: int
    boundaries: tuple[SourceBoundary, ...]
    observations_follow: bool
    render_digest: bytes
    native_ids: tuple[str, ...] = ()
    claimed_call_id: str | None = None
    normalization_version: int = SOURCE_VERSION
    claim_breaks_ties: bool = False
    has_unreadable_item: bool = False


class SourceHistory:
    """The atoms of a conversation, digested. Immutable; EMPTY_HISTORY is where each begins.

    Attributes:
        native_ids: ids that the items of the last answer echo, at most NATIVE_IDS_MAX.
        fault: what could not be read, or None. Nothing behind it counts, and nothing continues.
    """

    __slots__ = (
        "_atom_count",
        "_ends",
        "_in_answer",
        "_interrupted",
        "_observed",
        "_says_nothing",
        "_says_text",
        "_source_digest",
        "_spelling",
        "_spelling_digest",
        "fault",
        "native_ids",
    )

    def __init__(self) -> None:
        self._atom_count = 0
        self._source_digest = _NO_SOURCE
        self.native_ids: tuple[str, ...] = ()
        self.fault: str | None = None
        # Of the answers that something follows: their ends, longest first, and their spellings.
        self._ends: tuple[SourceBoundary, ...] = ()
        self._spelling_digest = _NO_SPELLING
        # Of the last answer, while nothing follows it.
        self._in_answer = False
        self._says_text = False
        self._says_nothing = True
        self._spelling = Spelling.ABSENT
        # Of what follows it.
        self._observed = False
        self._interrupted = False

    @property
    def atom_count(self) -> int:
        """Atoms so far; those behind an unreadable item do not count."""
        return self._atom_count + (self._in_answer and self._says_nothing)

    @property
    def source_digest(self) -> bytes:
        """Chained over the atoms, 32 bytes."""
        return self._closed()._source_digest  # noqa: SLF001 - of this very class

    @property
    def tool_content_digest(self) -> bytes:
        """Chained over the spellings of missing texts, 32 bytes."""
        return self._closed()._spelling_digest  # noqa: SLF001 - of this very class

    @property
    def boundaries(self) -> tuple[SourceBoundary, ...]:
        """The ends of the last answers, longest first, at most BOUNDARIES_MAX."""
        return () if self.fault is not None else self._closed()._ends  # noqa: SLF001 - as above

    @property
    def observations_follow(self) -> bool:
        """Whether user messages and tool results alone follow the last answer, and some do."""
        behind = not self._in_answer and bool(self._ends)
        return behind and self.fault is None and self._observed and not self._interrupted

    def extended(self, items: Iterable[object]) -> SourceHistory:
        """Return the history with these items behind it; costs what the items cost."""
        grown = copy.copy(self)
        for item in items:
            if grown.fault is not None:
                break
            atom = plain_atom(item)
            if atom is not None:
                grown._add_plain(atom)  # noqa: SLF001 - a copy of this very class
            else:
                grown._add_item(item)  # noqa: SLF001 - as above
        return grown

    def summary(self, render: bytes) -> SourceSummary:
        """Return what a record keeps of a conversation that ends here.

        Raises UnreadableItemError when an item could not be read.
        """
        if self.fault is not None:
            raise UnreadableItemError(self.fault)
        return SourceSummary(self.atom_count, self.source_digest, self.tool_content_digest, render)

    def probe(
        self,
        render: bytes,
        claimed_call_id: str | None = None,
        *,
        claim_breaks_ties: bool = False,
    ) -> SourceProbe:
        """Return what the ledger is asked about a request with this history."""
        return SourceProbe(
            atom_count=self.atom_count,
            boundaries=self.boundaries,
            observations_follow=self.observations_follow,
            render_digest=render,
            native_ids=self.native_ids,
            claimed_call_id=claimed_call_id,
            claim_breaks_ties=claim_breaks_ties,
            has_unreadable_item=self.fault is not None,
        )

    def _add_plain(self, atom: bytes) -> None:
        if atom[0] == AtomKind.TEXT:
            if not self._in_answer:
                self._begin_answer(Spelling.EMPTY)
            self._says_text, self._says_nothing = True, False
        else:
            self._add_observation(atom)
        self._chain(atom)

    def _add_item(self, item: object) -> None:
        try:
            read = item_atoms(item)
        except UnreadableItemError as error:
            self.fault = error.fact
            self.native_ids = ()
            return
        if read.spelling is None:
            for atom in read.atoms:
                self._add_observation(atom)
                self._chain(atom)
            return
        if not self._in_answer:
            self._begin_answer(read.spelling)
        for atom in read.atoms:
            self._says_text = self._says_text or atom[0] == AtomKind.TEXT
            self._says_nothing = self._says_nothing and atom[0] not in SAYING_KINDS
            self._chain(atom)
        if isinstance(item, dict):
            self._keep_id(item.get("id"))

    def _add_observation(self, atom: bytes) -> None:
        """Take note of what is not the model's."""
        if self._in_answer:
            self._end_answer()
        if atom[0] == AtomKind.MESSAGE and not is_user_message(atom):
            self._interrupted = True
        else:
            self._observed = True

    def _chain(self, atom: bytes) -> None:
        size = len(atom).to_bytes(8, "big")
        chained = b"".join((_SOURCE_DOMAIN, self._source_digest, size, atom))
        self._source_digest = hashlib.sha256(chained).digest()
        self._atom_count += 1

    def _begin_answer(self, spelling: Spelling) -> None:
        self._in_answer = self._says_nothing = True
        self._says_text = False
        self._spelling = spelling
        self.native_ids = ()

    def _end_answer(self) -> None:
        if self._says_nothing:
            self._chain(NOTHING_SAID)
        if not self._says_text:
            chained = _SPELLING_DOMAIN + self._spelling_digest + bytes([self._spelling])
            self._spelling_digest = hashlib.sha256(chained).digest()
        end = SourceBoundary(self._atom_count, self._source_digest, self._spelling_digest)
        self._ends = (end, *self._ends)[:BOUNDARIES_MAX]
        self._in_answer = self._observed = self._interrupted = False

    def _closed(self) -> SourceHistory:
        """Return the history as it is when nothing more belongs to its last answer."""
        if not self._in_answer:
            return self
        ended = copy.copy(self)
        ended._end_answer()  # noqa: SLF001 - a copy of this very class
        return ended

    def _keep_id(self, native_id: object) -> None:
        if not isinstance(native_id, str) or not 0 < len(native_id) <= NATIVE_ID_LENGTH_MAX:
            return
        if not native_id.isascii():
            return  # no call has such a name, and half a surrogate pair has no UTF-8
        if native_id not in self.native_ids and len(self.native_ids) < NATIVE_IDS_MAX:
            self.native_ids = (*self.native_ids, native_id)


EMPTY_HISTORY: Final = SourceHistory()
"""The history that has no atoms."""


def source_items(body: Item, dialect: Dialect) -> list[object]:
    """Return the items of a request: instructions as a system message, then the turns.

    A text `input` is the user message that it stands for. Nulls are left out; what else is no
    item is left for the history to refuse.
    """
    instructions = body.get("instructions")
    items: list[object] = []
    if instructions:
        items.append({"role": "system", "content": instructions})
    turns = body.get("messages" if dialect is Dialect.CHAT else "input")
    if isinstance(turns, str) and dialect is Dialect.RESPONSES:
        items.append({"role": "user", "content": turns})
    elif isinstance(turns, list):
        items += [turn for turn in turns if turn is not None]
    return items


def output_summary(items: Iterable[object]) -> OutputSummary:
    """Return what identifies an answer of these items; raises UnreadableItemError."""
    answer = EMPTY_HISTORY.extended(items)
    if answer.fault is not None:
        raise UnreadableItemError(answer.fault)
    return OutputSummary(answer.atom_count, answer.source_digest)


def effective_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that decide how items become tokens, each with its default.

    Null, an empty list and an empty object are as absent. `instructions` are an atom;
    `tool_choice`, `parallel_tool_calls` and `response_format` reach no template that is served.
    """
    effective: dict[str, object] = {}
    for name, default in _SOURCE_OPTIONS.items():
        value = options.get(name)
        effective[name] = default if value is None or value in _EMPTY else value
    return effective


def source_render_digest(options: Mapping[str, object]) -> bytes:
    """Return the 32-byte digest of the effective render options.

    Raises CanonicalJsonError for an option without canonical JSON.
    """
    text = canonical_json(effective_options(options))
    return hashlib.sha256(_RENDER_DOMAIN + text.encode()).digest()
