"""Reasoning inside rendered turns, told by its marks in the text of the tokens.

Texts come from harnesses and are long: everything here is linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from callforest_core.custody.tokens import TokenIds


class _Piece(NamedTuple):
    """A piece of reasoning in a text: where it begins and ends, its marks included."""

    start: int
    end: int
    is_opened: bool
    is_closed: bool


@dataclass(frozen=True, slots=True)
class ReasoningReader:
    """Finds reasoning in turns, so that what a template leaves out of them can be named.

    Attributes:
        decode: gives the text of ids, special tokens included.
        opens: the mark before reasoning, as in the text.
        closes: the mark behind it. Both as the engine's reasoning parser has them.
    """

    decode: Callable[[TokenIds], str]
    opens: str = "<think>"
    closes: str = "</think>"

    def says_the_same(self, whole: TokenIds, part: TokenIds) -> bool:
        """Say whether `part` is a turn without some of its reasoning, or of its white space."""
        one, other = self.decode(whole), self.decode(part)
        return self._said(one) == self._said(other) or self._is_cut_to_the_mark(one, other)

    def is_left_out(self, captured: TokenIds, rendered: TokenIds) -> bool:
        """Say whether captured tokens hold reasoning that is not in their rendering."""
        return self._count(self.decode(captured)) > self._count(self.decode(rendered))

    def _said(self, text: str) -> str:
        """Give a text without white space, and without reasoning that has both marks."""
        said, kept = [], 0
        for piece in self._pieces(text):
            if piece.is_opened and piece.is_closed:
                said.append(text[kept : piece.start])
                kept = piece.end
        return "".join("".join([*said, text[kept:]]).split())

    def _is_cut_to_the_mark(self, whole: str, part: str) -> bool:
        """Say whether one text is the other without a range that ends at a closing mark.

        So it is where the prompt held the opening mark: the answer begins inside its reasoning. The
        mark itself, and white space behind it, may be part of the range.
        """
        size = len(whole) - len(part)
        # A range of this size may end anywhere between these two: what remains is the same.
        first = len(whole) - _shared(reversed(whole), reversed(part))
        last = _shared(whole, part) + size
        if size <= 0 or first > last:
            return False
        mark = whole.find(self.closes)
        while 0 <= mark <= last:
            behind = mark + len(self.closes)
            blank = _shared_blank(whole, behind, last)
            if first <= mark or (first <= blank and behind <= last):
                return True
            mark = whole.find(self.closes, behind)
        return False

    def _count(self, text: str) -> int:
        """Count the pieces of reasoning that say something."""
        return sum(
            1
            for piece in self._pieces(text)
            if text[
                piece.start + len(self.opens) * piece.is_opened : piece.end
                - len(self.closes) * piece.is_closed
            ].strip()
        )

    def _pieces(self, text: str) -> Iterator[_Piece]:
        """Give each piece of reasoning.

        Without an opening mark it begins with the text, as when the prompt held the mark; without
        a closing one it ends with the text, as when it was cut.
        """
        begin, opened, closed = 0, text.find(self.opens), text.find(self.closes)
        while opened >= 0 or closed >= 0:
            if closed < 0:
                yield _Piece(opened, len(text), is_opened=True, is_closed=False)
                return
            end = closed + len(self.closes)
            is_opened = 0 <= opened < closed
            yield _Piece(opened if is_opened else begin, end, is_opened, is_closed=True)
            begin = end
            if 0 <= opened < end:
                opened = text.find(self.opens, end)
            closed = text.find(self.closes, end)


def _shared(one: Iterator[str] | str, other: Iterator[str] | str) -> int:
    """Count the characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_blank(text: str, start: int, most: int) -> int:
    """Give the end of the white space from `start` on, no further than `most`."""
    end = start
    while end < min(most, len(text)) and text[end].isspace():
        end += 1
    return end
