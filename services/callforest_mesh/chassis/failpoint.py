"""Named points at which a test ends this very process; in service each costs one look.

Nothing in the configuration reaches them: they are armed by the environment alone, before the
process starts, as in `CALLFOREST_FAILPOINTS="ledger.after_commit=exit@3"`: kill -9 of the process
itself when it passes the point for the third time (the first when no number is said). A name that
is not in POINTS, or a spelling that is not read, ends the start.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "CALLFOREST_FAILPOINTS"
DIARY_VARIABLE: Final = "CALLFOREST_FAILPOINTS_DIARY"
"""A file that gets a line `NAME PID` when a point ends the process."""

POINTS: Final[Mapping[str, str]] = {
    # Every store: one write, from its caller to its caller.
    "store.before_enqueue": "a write was taken; it does not wait yet",
    "store.after_enqueue": "a write waits for the writer thread",
    "store.before_begin": "the writer thread has a batch; no transaction is begun",
    "store.after_begin": "a transaction is begun and empty",
    "store.after_put": "one write of the batch is in the transaction",
    "store.before_commit": "the whole batch is in the transaction",
    "store.after_commit": "the batch is durable; no waiter was told",
    "store.after_ack": "the batch is durable and its waiters' loop was told",
    # Every item stream.
    "stream.before_validate": "an item has arrived; nothing was checked",
    "stream.after_validate": "an item is valid; its handler has not seen it",
    "stream.before_answer": "an item is answered; the answer is not in a message",
    "stream.after_answer": "the message with the answer was given to gRPC",
    "admission.after_open": "an attempt is open at the ledger; its opener does not know",
    "admission.before_intent": "a call is to be announced to the ledger",
    "admission.after_verdict": "the ledger has judged a call; the gateway does not know",
    "admission.before_close": "an attempt's admissions are to be closed",
    "admission.after_close": "an attempt's admissions are closed; its owner does not know",
    "ledger.after_open": "an attempt is open and durable; nobody was told",
    "ledger.before_intent": "an intent has arrived; nothing is queued",
    "ledger.before_row": "a record, failure or withdrawal has arrived; nothing is queued",
    "ledger.after_append": "events are in the transaction, not committed",
    "ledger.after_durable": "events are durable; neither watchers nor caller know",
    "ledger.before_close": "an attempt's admissions are to be closed",
    "ledger.after_close": "that the admissions are closed is durable; nobody was told",
    "ledger.before_seal": "an attempt is to be sealed",
    "ledger.after_seal": "the seal is durable; nobody was told",
    "staging.before_check": "a call has arrived; its digest was not computed",
    "staging.after_check": "a call is what it says; it is not queued",
    "staging.after_put": "a call is in the transaction, its segment is not",
    "staging.before_receipt": "a call is durable; it has no receipt yet",
    "staging.before_delete": "consumed calls are to go",
    "staging.after_delete": "consumed calls are gone; the finalizer does not know",
    "staging.before_drop": "an attempt is to be torn down",
    "staging.after_drop_part": "a part of an attempt, perhaps the last, is torn down",
    "finalizer.before_judge": "a rollout is to be judged",
    "finalizer.after_judge": "a rollout has its receipt, in memory alone",
    "finalizer.after_receipt_put": "a receipt is in the transaction, its slot is not",
    "finalizer.after_receipt": "a receipt is durable; nobody was told",
    "finalizer.before_publish": "a group is laid out, in memory alone",
    "finalizer.after_group_put": "a group is in the transaction, its name and the head are not",
    "finalizer.after_publish": "a group has its position; neither subscriber nor caller know",
    "finalizer.before_delivery": "a group is read; nothing of it was sent",
    "finalizer.before_cursor": "a commit of the cursor has arrived",
    "finalizer.after_cursor": "the cursor is durable; it is not confirmed",
    "finalizer.before_clean": "a consumed position is to be cleaned",
    "finalizer.after_delete": "staged calls of one rollout are gone, those of others may be there",
    "finalizer.after_clean": "a position's staged calls are gone; the cleaned cursor lags",
    "finalizer.after_cleaned": "the cleaned cursor is durable",
    "worker.before_prefix": "a call has arrived; its prefix was not fetched",
    "worker.before_engine": "the prefix is there; the engine was not asked",
    "worker.after_engine": "tokens are sampled; none is staged",
    "worker.before_stage": "a call is captured; it is not sent to staging",
    "worker.after_stage": "the tokens are durable; the gateway does not know",
    "worker.before_load": "new weights are checked; the engine has the old ones",
    "worker.after_load": "the engine has new weights; no record says so",
    "worker.after_record": "new weights are on record; the trainer does not know",
    "gateway.before_intent": "a call is read; nobody was told of it",
    "gateway.before_engine": "a call is admitted; its worker has not been asked",
    "gateway.after_engine": "the worker has answered; nothing of its answer is read",
    "gateway.after_staging": "the answer is read and its coordinates are in hand; no row was sent",
    "gateway.after_append": "the ledger has answered the row; the call does not know yet",
    "gateway.after_commit_ack": "the call knows that its row is durable; nothing has left",
    "gateway.after_keep_alive": "a stream's status line and first comment have left; no answer yet",
    "gateway.after_reply_began": "the response's status line has left, its body has not",
    "trainer.before_step": "a step is laid out; the learner was not asked",
    "trainer.after_step": "the learner has made a step; only its memory knows",
    "trainer.after_export": "a version's weights are a file; the version is not issued",
    "trainer.after_issue": "a version is issued; no worker knows",
    "trainer.after_push": "the workers serve a version; the file of the one before is there",
    "trainer.before_checkpoint": "a checkpoint is to be written",
    "trainer.before_rename": "the learner has written a checkpoint under its unfinished name",
    "trainer.after_rename": "the checkpoint is named; its directory is not synced",
    "trainer.after_checkpoint": "a checkpoint is durable; no cursor was committed behind it",
    "trainer.after_cursor": "the cursor behind a checkpoint is durable; who waited was not told",
}
"""Every point by its name, with what is true when it is passed."""

_SPELLING: Final = re.compile(r"(?P<name>[a-z_.]+)=exit(?:@(?P<nth>[1-9]\d*))?")


class Trap:
    """What an armed point does at one of its passings.

    Args:
        name: the point.
        nth: the passing that springs it, from 1.
    """

    def __init__(self, name: str, nth: int) -> None:
        self.name = name
        self.nth = nth
        self._passings = itertools.count(1)

    def passed(self) -> None:
        """Count a passing, on whichever thread; at the right one end the process."""
        if next(self._passings) == self.nth:
            _note(self.name)
            os.kill(os.getpid(), signal.SIGKILL)


def read_traps(armed: str) -> dict[str, Trap]:
    """Read what is armed: `NAME=exit` or `NAME=exit@N`, with commas between.

    Raises:
        ValueError: a spelling is not read, or a name is unknown or comes twice.
    """
    traps: dict[str, Trap] = {}
    for part in filter(None, armed.split(",")):
        found = _SPELLING.fullmatch(part)
        if found is None or found["name"] not in POINTS or found["name"] in traps:
            raise ValueError(f"{VARIABLE}: {part!r} does not arm a point")
        traps[found["name"]] = Trap(found["name"], int(found["nth"] or 1))
    return traps


_TRAPS: Final = read_traps(os.environ.get(VARIABLE, "")) or None


def failpoint(name: str) -> None:
    """Pass a point: nothing happens unless it is armed."""
    if _TRAPS is not None and (trap := _TRAPS.get(name)) is not None:
        trap.passed()


def is_armed(name: str) -> bool:
    """Say whether a point would do anything, now or at a later passing."""
    return _TRAPS is not None and name in _TRAPS


def _note(name: str) -> None:
    """Leave a line that outlives the process; one write, so that lines never mix."""
    if diary := os.environ.get(DIARY_VARIABLE):
        descriptor = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{name} {os.getpid()}\n".encode())
        finally:
            os.close(descriptor)
