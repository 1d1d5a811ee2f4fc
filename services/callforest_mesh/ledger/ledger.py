"""The ledger: decisions applied in durable transactions, and reads of what is durable.

Views live on the store's writer thread and may be ahead of the disk: decisions need that. What only
reads is answered from views that are not (see `durable_views`), and waits for no commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    restore_point_pb2,
)
from callforest.ledger.v1 import ledger_service_pb2
from callforest_core.custody.attempts import AttemptName
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.ledger import commits, core, refusals, restore_refusals, restoring
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.core import Decision
from callforest_mesh.ledger.durable_views import Change, DurableViews
from callforest_mesh.ledger.manifest_pages import page_reader
from callforest_mesh.ledger.outline import CHAIN, SEALED, AttemptKey, AttemptOutline, AttemptSummary
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import LedgerStore, LogReader, LogWriter
from callforest_mesh.ledger.views import AttemptViews

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class _Session:
    """One run of a function inside a transaction, on the writer thread."""

    log: LogWriter
    views: AttemptViews[AttemptView]
    changes: list[Change] = field(default_factory=list)

    def view(self, attempt: AttemptKey) -> AttemptView | None:
        return self.views.load(self.log, attempt)

    def apply(
        self, attempt: AttemptKey, view: AttemptView | None, decision: Decision[T]
    ) -> Decision[T]:
        """Append what was decided of a view, first to the log and then to the view."""
        if not decision.events:
            return decision
        revision = 0 if view is None else view.revision
        self.log.append(attempt, revision, decision.events)
        events = iter(decision.events)
        if view is None:
            view = AttemptView(next(events).attempt_opened)
            self.views.keep(attempt, view)
        for event in events:
            view.apply(event)
        self.changes.append(Change(attempt, revision, decision.events, view.summary()))
        return decision

    def show(self, attempt: AttemptKey) -> attempt_pb2.Attempt:
        """Give an attempt as its readers see it; raises Refusal: ATTEMPT_NOT_FOUND."""
        return _show(self.log, self.view(attempt), attempt)


class Ledger:
    """Records attempts and calls.

    Args:
        store: where the logs are.
        watch: is told what became durable.
        cached_calls_max: most calls whose views are kept in memory, for the writer and for reads.
    """

    def __init__(
        self, store: LedgerStore, watch: SettlementWatch, *, cached_calls_max: int
    ) -> None:
        self._store = store
        self._watch = watch
        self._views = AttemptViews(AttemptView, cached_calls_max)
        self._outlines = DurableViews(AttemptOutline, store, cached_calls_max)
        self._durable = DurableViews(AttemptView, store, cached_calls_max)
        self._writes: set[asyncio.Future[object]] = set()

    async def open_attempt(
        self,
        tenant: str,
        rollout_id: str,
        request_id: str,
        mode: attempt_pb2.CaptureMode.ValueType = CHAIN,
    ) -> attempt_pb2.Attempt:
        """Open the next attempt of a rollout and seal the one before, in one transaction.

        A repeat of the request gets the answer of its first.

        Raises:
            Refusal: MODE_MISMATCH, a repeat asks for another mode; RESTORE_REFUSED,
                repeat_differs: the request restored an attempt.
        """

        def run(session: _Session) -> attempt_pb2.Attempt:
            known = session.log.attempt_opened_by(tenant, rollout_id, request_id)
            if known is not None:
                key = AttemptKey(tenant, AttemptName(rollout_id, known).capture_key)
                return core.hold_mode(_first_answer(session.log, key), mode)
            latest = session.log.latest_attempt(tenant, rollout_id)
            number = 0 if latest is None else latest + 1
            if latest is not None:
                before = AttemptKey(tenant, AttemptName(rollout_id, latest).capture_key)
                view = session.view(before)
                # What was forgotten was sealed.
                if view or not session.log.was_forgotten(tenant, rollout_id, latest):
                    session.apply(before, view, core.seal(view, before.capture_key))
            attempt = AttemptKey(tenant, AttemptName(rollout_id, number).capture_key)
            opened = core.opened_event(tenant, rollout_id, number, request_id, mode)
            session.apply(attempt, None, Decision(None, (opened,)))
            return session.show(attempt)

        return await self._run(run, _unchanged)

    async def restore_attempt(
        self,
        tenant: str,
        rollout_id: str,
        request_id: str,
        message: restore_point_pb2.RestorePoint,
    ) -> restoring.Restored:
        """Open the next attempt with calls of the one before, and seal that, in one transaction.

        A repeat of the request gets the answer of its first until the attempt is used.

        Raises:
            Refusal: RESTORE_REFUSED; ATTEMPT_NOT_FOUND, the rollout has no attempt.
        """
        point = restoring.read_point(message)

        def run(session: _Session) -> restoring.Restored:
            log = session.log
            known = log.attempt_opened_by(tenant, rollout_id, request_id)
            if known is not None:
                key = AttemptKey(tenant, AttemptName(rollout_id, known).capture_key)
                if (opened := session.view(key)) is None:
                    raise restore_refusals.log_forgotten(key.capture_key)
                restoring.check_repeat(opened, point)
                return restoring.Restored(session.show(key), is_repeat=True)
            latest = log.latest_attempt(tenant, rollout_id)
            if latest is None:
                raise refusals.attempt_not_found(point.capture_key)
            before = AttemptKey(tenant, AttemptName(rollout_id, latest).capture_key)
            if point.capture_key != before.capture_key:
                raise restore_refusals.not_latest(point.capture_key, before.capture_key)
            view = session.view(before)
            if view is None and log.was_forgotten(tenant, rollout_id, latest):
                raise restore_refusals.log_forgotten(before.capture_key)
            view = core.require(view, before.capture_key)
            events = restoring.restored_events(view, point, request_id)
            session.apply(before, view, core.seal(view, before.capture_key))
            attempt = AttemptKey(tenant, events[0].attempt_opened.capture_key)
            session.apply(attempt, None, Decision(None, events))
            return restoring.Restored(session.show(attempt), is_repeat=False)

        return await self._run(run, _unchanged)

    def record_intent(
        self, tenant: str, intent: attempt_pb2.CallIntent
    ) -> asyncio.Future[capture_admission_pb2.Verdict]:
        """Announce a call and say what it continues."""
        attempt = AttemptKey(tenant, intent.capture_key)
        return self._apply(attempt, lambda view: core.record_intent(view, intent))

    async def find_predecessor(
        self, request: ledger_service_pb2.FindPredecessorRequest
    ) -> capture_admission_pb2.Verdict:
        """Give the verdict that record_intent would give on what is durable now."""
        attempt = AttemptKey(request.tenant, request.capture_key)
        return await self._durable.read(
            attempt, lambda _, view: core.find_predecessor(view, request)
        )

    async def get_call(
        self, attempt: AttemptKey, call_id: str
    ) -> ledger_service_pb2.GetCallResponse:
        """Give all that the log says of a call."""
        return await self._durable.read(
            attempt, lambda _, view: core.get_call(view, attempt.capture_key, call_id)
        )

    def commit_record(
        self, tenant: str, record: call_record_pb2.CallRecord
    ) -> asyncio.Future[ledger_service_pb2.CommittedEntry]:
        """Append the record of a staged call."""
        attempt = AttemptKey(tenant, record.coords.capture_key)
        return self._apply(attempt, lambda view: commits.commit_record(view, record), reserve=True)

    def commit_failure(
        self, tenant: str, failure: attempt_pb2.CallFailure
    ) -> asyncio.Future[ledger_service_pb2.CommittedEntry]:
        """Append a failure row."""
        attempt = AttemptKey(tenant, failure.capture_key)
        return self._apply(
            attempt, lambda view: commits.commit_failure(view, failure), reserve=True
        )

    def commit_withdrawal(
        self, tenant: str, withdrawal: attempt_pb2.CallWithdrawal
    ) -> asyncio.Future[ledger_service_pb2.CommittedEntry]:
        """Settle a call that was refused before it was generated."""
        attempt = AttemptKey(tenant, withdrawal.capture_key)
        return self._apply(
            attempt, lambda view: commits.commit_withdrawal(view, withdrawal), reserve=True
        )

    async def close_admissions(self, attempt: AttemptKey) -> attempt_pb2.Attempt:
        """End new calls of an attempt."""
        return await self._change(attempt, core.close)

    async def seal(self, attempt: AttemptKey) -> attempt_pb2.Attempt:
        """Fix an attempt's epoch, revision and pending calls."""
        return await self._change(attempt, core.seal)

    async def forget(self, attempt: AttemptKey) -> int:
        """Remove the log of a sealed attempt; give how many events it had, 0 without a log.

        Raises:
            Refusal: ATTEMPT_NOT_SEALED.
        """

        def run(session: _Session) -> int:
            view = session.view(attempt)
            if view is None:
                return 0
            if view.state != SEALED:
                raise refusals.attempt_not_sealed(attempt.capture_key, view.state)
            session.views.forget(attempt)
            return session.log.forget(view.opened)

        return await self._run(run, _unchanged, reserve=True)

    async def has_rows(self, attempt: AttemptKey) -> bool:
        """Say whether a call of the attempt committed or failed (LED-2)."""
        return await self._outlines.read(
            attempt, lambda _, outline: outline is not None and outline.has_rows
        )

    async def await_settled(self, attempt: AttemptKey, *, wait_s: float) -> attempt_pb2.Attempt:
        """Give the attempt when no call is pending or it is sealed, or when `wait_s` is over.

        An open attempt may get more calls afterwards: close it first.
        """

        async def look() -> AttemptSummary:
            return await self._outlines.read(
                attempt, lambda _, outline: core.require(outline, attempt.capture_key).summary()
            )

        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            left_s = max(0.0, deadline - loop.time())
            was_final = await self._watch.wait(attempt, look, wait_s=left_s)
            shown = await self._shown(attempt)
            # An open attempt may have got another call since.
            if not was_final or not shown.pending_call_ids or shown.state == SEALED:
                return shown

    async def manifest(
        self, attempt: AttemptKey
    ) -> AsyncIterator[attempt_pb2.Attempt | list[attempt_pb2.ManifestEntry]]:
        """Give the attempt, then pages of its rows as of that moment.

        Each page is a snapshot of its own: the log only grows, and rows behind the shown revision
        are left out, so the pages fit each other and a slow reader pins nothing.
        """
        shown = await self._shown(attempt)
        yield shown
        revision = 0
        while revision < shown.revision:
            page = self._store.read(page_reader(attempt, revision, shown.revision))
            yield page.entries
            revision = page.revision

    async def stop(self) -> None:
        """Wait for the writes that were begun."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def _shown(self, attempt: AttemptKey) -> attempt_pb2.Attempt:
        """Give an attempt as it is durable now; raises Refusal: ATTEMPT_NOT_FOUND."""
        return await self._outlines.read(attempt, lambda log, outline: _show(log, outline, attempt))

    async def _change(
        self, attempt: AttemptKey, decide: Callable[[AttemptView | None, str], Decision[None]]
    ) -> attempt_pb2.Attempt:
        def run(session: _Session) -> attempt_pb2.Attempt:
            view = session.view(attempt)
            session.apply(attempt, view, decide(view, attempt.capture_key))
            return session.show(attempt)

        return await self._run(run, _unchanged, reserve=True)

    def _apply(
        self,
        attempt: AttemptKey,
        decide: Callable[[AttemptView | None], Decision[T]],
        *,
        reserve: bool = False,
    ) -> asyncio.Future[T]:
        def run(session: _Session) -> Decision[T]:
            view = session.view(attempt)
            return session.apply(attempt, view, decide(view))

        return self._run(run, _answer_of, reserve=reserve)

    def _run(
        self,
        fn: Callable[[_Session], T],
        answer_of: Callable[[T], AnswerT],
        *,
        reserve: bool = False,
    ) -> asyncio.Future[AnswerT]:
        """Run a function in a transaction; a caller that goes away does not undo it."""

        def run(log: LogWriter) -> tuple[T, list[Change]]:
            session = _Session(log, self._views)
            return fn(session), session.changes

        def written(outcome: tuple[T, list[Change]]) -> AnswerT:
            result, changes = outcome
            failpoint("ledger.after_durable")
            for change in changes:
                self._outlines.advance(change)
                self._watch.publish(change.attempt, change.summary)
            return answer_of(result)

        future = self._store.submit(run, written, reserve=reserve)
        self._writes.add(cast("asyncio.Future[object]", future))
        future.add_done_callback(self._written)
        return future

    def _written(self, future: asyncio.Future[AnswerT]) -> None:
        self._writes.discard(cast("asyncio.Future[object]", future))
        if not future.cancelled():
            future.exception()  # its caller may be gone; then nobody else looks at it


def _show(log: LogReader, view: AttemptOutline | None, attempt: AttemptKey) -> attempt_pb2.Attempt:
    """Give an attempt as its readers see it; raises Refusal: ATTEMPT_NOT_FOUND."""
    known = core.require(view, attempt.capture_key)
    latest = log.latest_attempt(attempt.tenant, known.opened.rollout_id)
    return known.attempt(superseded=latest != known.opened.attempt_number)


def _unchanged(result: T) -> T:
    return result


def _answer_of(decision: Decision[T]) -> T:
    if decision.refusal is not None:
        raise decision.refusal
    return decision.answer


def _first_answer(log: LogReader, attempt: AttemptKey) -> attempt_pb2.Attempt:
    first = [event for _, event in log.read(attempt, limit=1)]
    if first and first[0].attempt_opened.restored_from:
        # Handed out as an attempt without restore, its calls would surprise its harness.
        raise restore_refusals.repeat_differs(attempt.capture_key)
    view = AttemptView.replay(first)
    return core.require(view, attempt.capture_key).attempt(superseded=False)
