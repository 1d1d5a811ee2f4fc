"""What a check of the installation found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        subject: what was looked at.
        text: what was found and, if it is not ok, what to do.
        ok: whether the mesh can run with it.
    """

    subject: str
    text: str
    ok: bool


def good(subject: str, text: str) -> Finding:
    """Make the finding of a check that passed."""
    return Finding(subject, text, ok=True)


def bad(subject: str, text: str) -> Finding:
    """Make the finding of a check that failed; the text says what to do."""
    return Finding(subject, text, ok=False)
