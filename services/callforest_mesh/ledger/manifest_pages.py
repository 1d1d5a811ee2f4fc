"""Pages of a manifest: snapshots of a log that only grows, so that they fit each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.outline import AttemptKey, record_of
from callforest_mesh.ledger.store import LogReader

PAGE_BYTES: Final = 256 * 1024
"""Most bytes of rows in one page of a manifest; well below the contract's 1 MiB."""
PAGE_EVENTS: Final = 512
"""Most events read for one page, so that no page holds the event loop for long."""


@dataclass(frozen=True, slots=True)
class ManifestPage:
    """A part of an attempt's rows.

    Attributes:
        entries: the rows, in order.
        revision: of the last event that the page covers.
    """

    entries: list[attempt_pb2.ManifestEntry]
    revision: int


def page_reader(attempt: AttemptKey, after: int, last: int) -> Callable[[LogReader], ManifestPage]:
    """Make the function that reads the next page, of the events behind `after` up to `last`."""

    def read(log: LogReader) -> ManifestPage:
        entries: list[attempt_pb2.ManifestEntry] = []
        covered, size = after, 0
        limit = min(PAGE_EVENTS, last - after)
        for revision, event in log.read(attempt, after=after, limit=limit):
            covered = revision
            record = record_of(event)
            if record is not None:
                entries.append(attempt_pb2.ManifestEntry(record=record))
            elif event.HasField("failure"):
                entries.append(attempt_pb2.ManifestEntry(failure=event.failure))
            elif event.HasField("withdrawal"):
                entries.append(attempt_pb2.ManifestEntry(withdrawal=event.withdrawal))
            size += event.ByteSize()
            if size >= PAGE_BYTES:
                break
        if covered == after:
            raise refusals.log_corrupt(attempt.capture_key, f"no event {after + 1}")
        return ManifestPage(entries, covered)

    return read
