"""Reasoning inside rendered turns, told by its marks in the text of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from callforest_core.custody.tokens import TokenIds


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
        """Say whether two turns differ in nothing but reasoning and white space."""
        return self._said(whole) == self._said(part)

    def is_left_out(self, captured: TokenIds, rendered: TokenIds) -> bool:
        """Say whether captured tokens hold reasoning that is not in their rendering."""
        return self._count(captured) > self._count(rendered)

    def _said(self, token_ids: TokenIds) -> str:
        """Give the text without reasoning, its marks and white space."""
        said, _ = self._parted(token_ids)
        return "".join(said.split())

    def _count(self, token_ids: TokenIds) -> int:
        """Count the pieces of reasoning that say something."""
        _, reasoning = self._parted(token_ids)
        return sum(1 for piece in reasoning if piece.strip())

    def _parted(self, token_ids: TokenIds) -> tuple[str, list[str]]:
        """Part a text into what is said and the pieces of reasoning.

        Reasoning without an opening mark begins with the text, as when the prompt held the mark;
        without a closing one it ends with the text, as when it was cut.
        """
        said, reasoning = "", []
        rest = self.decode(token_ids)
        while self.opens in rest or self.closes in rest:
            before, mark, behind = rest.partition(self.opens)
            if self.closes in before or not mark:
                piece, _, rest = rest.partition(self.closes)
            else:
                said += before
                piece, _, rest = behind.partition(self.closes)
            reasoning.append(piece)
        return said + rest, reasoning
