"""`callforest gc`: removes what no training can need any more, beside running services.

The plan is made from snapshots of the stores; what is removed, its own service removes. A plan that
is minutes old is as right as a new one, since it rests on nothing that can be undone: a sealed
attempt gets no row, a superseded one is never finalized, a consumed group is never sent again, and
what a rollout's latest attempt holds of earlier ones only shrinks: the next one restores from that,
or nothing. So a sweep may be repeated, killed anywhere, or run twice at once.

A rollout that has a receipt is its finalizer's until that has cleaned it. A finalization that had
begun may fix a receipt of an attempt that was superseded meanwhile; so the Ledger is looked at
before the Finalizer, and the Finalizer is asked again before anything of a rollout without a
receipt goes.

Nothing of this is true of a rollout whose owner died: it is named, and goes only by an age that the
operator gives (see `abandoned_rollouts`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.finalizer import FinalizerClient
from callforest_mesh.abandoned_rollouts import AbandonedRollout, look_at, release
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.finalizer.inventory import FinalizerInventory
from callforest_mesh.ledger.inventory import LedgerInventory, LoggedAttempt
from callforest_mesh.staging.inventory import StagedInventory
from callforest_mesh.store_set import StoreSet

_ORDER: Final = ("staging", "ledger", "finalizer")
"""In which the stores are looked at."""


@dataclass(frozen=True, slots=True)
class SweepPolicy:
    """How old what is removed must be, in seconds behind the admission of an attempt's last call.

    Attributes:
        late_s: bytes without a record, and superseded attempts but for what was restored of them:
            the settle deadline and an age beyond it (LED-8).
        log_s: logs of attempts whose group was consumed. Rollouts without a receipt that are older
            are named.
        abandoned_s: rollouts without a receipt, whole; None to keep them. It must be longer than a
            live rollout may go without a call, and its owner without finalizing it.
    """

    late_s: float
    log_s: float
    abandoned_s: float | None = None

    def releases(self, age_s: float | None) -> bool:
        """Say whether a rollout without a receipt goes whose last call of its own is so old.

        One that cannot be dated does not: it may have been restored a moment ago.
        """
        if self.abandoned_s is None or age_s is None:
            return False
        return age_s > self.abandoned_s


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to remove.

    Attributes:
        kind: `late`: staged calls of a sealed attempt that have no record. `unrestored`: staged
            calls of a superseded attempt that the latest one did not restore. `drop`: all that a
            consumed or superseded attempt staged, for good. `log`: the log of a consumed attempt.
        tenant: owns the attempt.
        capture_key: names it.
        call_ids: the calls, of `late` and `unrestored`.
        count: calls, or events of a log.
        rollout_id: the rollout, if this rests on its having no receipt; else "".
    """

    kind: Literal["late", "unrestored", "drop", "log"]
    tenant: str
    capture_key: str
    call_ids: tuple[str, ...]
    count: int
    rollout_id: str = ""


class StoreAbsentError(FileNotFoundError):
    """A store that a sweep must look into is not on this machine."""


def sweep(
    configuration: MeshConfiguration,
    paths: Mapping[str, Path],
    policy: SweepPolicy,
    *,
    now_s: float,
    apply: bool,
) -> tuple[list[str], int]:
    """Find what can go, and remove it if that is wanted.

    Args:
        configuration: says where the services are.
        paths: the directories of the three stores.
        policy: what is old.
        now_s: the time, in seconds since the epoch.
        apply: whether to remove it.

    Returns:
        The lines to print, the last for programs, and the exit status: 1 when a log is damaged.

    Raises:
        StoreAbsentError: one of the three stores is not on this machine.
        Refusal: STORE_CORRUPT, a store cannot be read.
        CallforestError: a service does not answer; what was removed until then stays so.
    """
    for path in paths.values():
        if not path.is_dir():
            raise StoreAbsentError(f"{path} is not there: run gc where all three stores are")
    with StoreSet({name: paths[name] for name in _ORDER if name in paths}) as stores:
        found = list(plan(stores, policy, now_s=now_s))
    removals = [one for one in found if isinstance(one, Removal)]
    rollouts = [one for one in found if isinstance(one, AbandonedRollout)]
    old = [one for one in rollouts if policy.releases(one.age_s)]
    kept = [one for one in rollouts if not policy.releases(one.age_s)]
    faults = [one for one in found if isinstance(one, StoreFault)]
    if apply:
        removals = asyncio.run(_apply(configuration, removals))
        old = asyncio.run(_release(configuration, old))
    verb = "removed" if apply else "would remove"
    lines = [f"fault  {fault.key}  {fault.text}; left alone" for fault in faults]
    lines += [f"{verb} {_described(one)}" for one in removals]
    lines += [f"{verb} {one.described()}" for one in old]
    lines += [f"kept {one.described()}; {_advice(one)}" for one in kept]
    counts: dict[str, object] = {"applied": apply, "faults": len(faults)}
    for kind in ("late", "unrestored", "drop", "log"):
        chosen = [one.count for one in removals if one.kind == kind]
        counts |= {f"{kind}_attempts": len(chosen), f"{kind}_records": sum(chosen)}
    for name, named in (("abandoned", old), ("kept", kept)):
        counts |= {
            f"{name}_rollouts": len(named),
            f"{name}_records": sum(one.call_count for one in named),
            f"{name}_bytes": sum(one.byte_count for one in named),
        }
    if (removals or old) and not apply:
        lines.append("nothing was removed: say --apply to do it")
    return [*lines, f"RESULT {json.dumps(counts)}"], 1 if faults else 0


def plan(
    stores: StoreSet, policy: SweepPolicy, *, now_s: float
) -> Iterator[Removal | StoreFault | AbandonedRollout]:
    """Find what no training can need any more; an attempt whose log is damaged is left alone.

    Rollouts without a receipt come too, once they are old enough to be released or named.
    """
    staging, ledger, finalizer = stores.staging, stores.ledger, stores.finalizer
    if staging is None or ledger is None or finalizer is None:
        raise StoreAbsentError("gc needs the stores of Staging, Ledger and Finalizer")
    planner = _Planner(staging, ledger, finalizer, policy, now_s)
    for _, attempt in ledger.attempts():
        if isinstance(attempt, StoreFault):
            yield attempt
        else:
            yield from planner.of_attempt(attempt)


class _Planner:
    """Finds what of an attempt can go."""

    def __init__(
        self,
        staging: StagedInventory,
        ledger: LedgerInventory,
        finalizer: FinalizerInventory,
        policy: SweepPolicy,
        now_s: float,
    ) -> None:
        self._now_s = now_s
        self._staging = staging
        self._ledger = ledger
        self._finalizer = finalizer
        self._policy = policy
        self._abandoned: dict[tuple[str, str], bool] = {}
        self._held: dict[tuple[str, str], frozenset[tuple[str, str]] | None] = {}

    def of_attempt(
        self, attempt: LoggedAttempt
    ) -> Iterator[Removal | StoreFault | AbandonedRollout]:
        """Find what can go of an attempt, by the age of its last call."""
        age_s = self._now_s - attempt.last_admit_s
        tenant, rollout_id = attempt.key.tenant, attempt.view.opened.rollout_id
        is_sealed = attempt.view.state == attempt_pb2.ATTEMPT_STATE_SEALED
        # Not merely consumed: until it is cleaned, the finalizer itself is at work on it.
        if self._finalizer.is_cleaned(tenant, rollout_id):
            forget = is_sealed and age_s > self._policy.log_s
            yield from self._of_cleaned(attempt, forget=forget)
        elif self._finalizer.receipt(tenant, rollout_id) is not None:
            return
        elif self._is_abandoned(attempt):
            if not attempt.superseded:
                yield look_at(attempt, self._staging, self._now_s)
        else:
            if is_sealed and age_s > self._policy.late_s:
                found = self._of_superseded if attempt.superseded else self._of_latest
                yield from found(attempt, self._staging.call_ids(*attempt.key))
            if not attempt.superseded and attempt.last_admit_s and age_s > self._policy.log_s:
                yield look_at(attempt, self._staging, self._now_s)

    def _is_abandoned(self, attempt: LoggedAttempt) -> bool:
        """Say whether the rollout of an attempt goes whole, by its latest attempt's own calls."""
        if self._policy.abandoned_s is None:
            return False
        if attempt.superseded:
            rollout = attempt.key.tenant, attempt.view.opened.rollout_id
            if rollout not in self._abandoned:
                found = self._ledger.latest(*rollout)
                self._abandoned[rollout] = found is not None and self._is_abandoned(found)
            return self._abandoned[rollout]
        return self._policy.releases(attempt.age_s(self._now_s))

    def _of_cleaned(self, attempt: LoggedAttempt, *, forget: bool) -> Iterator[Removal]:
        tenant, capture_key = attempt.key
        staged = self._staging.call_ids(tenant, capture_key)
        # A dropped attempt takes nothing more; one whose log goes must be, or its bytes were
        # orphans. One that was opened too late to be finalized goes although nobody sealed it.
        if staged or (forget and not self._staging.is_dropped(tenant, capture_key)):
            yield Removal("drop", tenant, capture_key, (), len(staged))
        if forget:
            yield Removal("log", tenant, capture_key, (), attempt.view.revision)

    def _of_latest(self, attempt: LoggedAttempt, staged: list[str]) -> Iterator[Removal]:
        committed = {record.coords.call_id for record in attempt.own_records}
        late = tuple(call_id for call_id in staged if call_id not in committed)
        if late:
            yield self._removal("late", attempt, late, len(late))

    def _of_superseded(
        self, attempt: LoggedAttempt, staged: list[str]
    ) -> Iterator[Removal | StoreFault]:
        """Find what the latest attempt did not restore; it can never be finalized."""
        if not staged:
            return
        held = self._held_of(attempt.key.tenant, attempt.view.opened.rollout_id)
        if held is None:
            text = "the log of its rollout's latest attempt, which may have restored it, is damaged"
            yield StoreFault(attempt.key.capture_key, text)
            return
        gone = tuple(one for one in staged if (attempt.key.capture_key, one) not in held)
        if not any(owner == attempt.key.capture_key for owner, _ in held):
            yield self._removal("drop", attempt, (), len(staged))
        elif gone:
            yield self._removal("unrestored", attempt, gone, len(gone))

    def _held_of(self, tenant: str, rollout_id: str) -> frozenset[tuple[str, str]] | None:
        """Give what a rollout's latest attempt restored, by owner; None when nobody can say."""
        if (tenant, rollout_id) not in self._held:
            latest = self._ledger.latest(tenant, rollout_id)
            self._held[tenant, rollout_id] = None if latest is None else _restored_in(latest)
        return self._held[tenant, rollout_id]

    def _removal(
        self,
        kind: Literal["late", "unrestored", "drop"],
        attempt: LoggedAttempt,
        call_ids: tuple[str, ...],
        count: int,
    ) -> Removal:
        rollout_id = attempt.view.opened.rollout_id
        return Removal(kind, *attempt.key, call_ids, count, rollout_id)


def _restored_in(latest: LoggedAttempt) -> frozenset[tuple[str, str]]:
    return frozenset(
        (record.source_capture_key, record.coords.call_id)
        for record in latest.records
        if record.source_capture_key
    )


async def _apply(configuration: MeshConfiguration, removals: list[Removal]) -> list[Removal]:
    """Have the services remove it: of an attempt, first what it staged, then its log.

    Returns:
        What was removed: nothing of a rollout that has got a receipt since the plan was made.
    """
    done: list[Removal] = []
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        staging, ledger, finalizer = clients.staging(), clients.ledger(), clients.finalizer()
        for one in removals:
            tenant = finalizer.for_tenant(one.tenant)
            if one.rollout_id and await _has_receipt(tenant, one.rollout_id):
                continue
            done.append(one)
            if one.kind in ("late", "unrestored"):
                await staging.for_tenant(one.tenant).delete(one.capture_key, one.call_ids)
            elif one.kind == "drop":
                await staging.for_tenant(one.tenant).drop_partition(one.capture_key)
            else:
                await ledger.for_tenant(one.tenant).forget(one.capture_key)
    return done


async def _release(
    configuration: MeshConfiguration, rollouts: list[AbandonedRollout]
) -> list[AbandonedRollout]:
    """Release rollouts; give those that were."""
    done: list[AbandonedRollout] = []
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        staging, ledger, finalizer = clients.staging(), clients.ledger(), clients.finalizer()
        for one in rollouts:
            has_receipt = partial(_has_receipt, finalizer.for_tenant(one.tenant), one.rollout_id)
            tenant = one.tenant
            if await release(
                one, staging.for_tenant(tenant), ledger.for_tenant(tenant), has_receipt
            ):
                done.append(one)
    return done


async def _has_receipt(finalizer: FinalizerClient, rollout_id: str) -> bool:
    try:
        await finalizer.receipt(rollout_id)
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_RECEIPT_NOT_FOUND:
            raise
        return False
    return True


def _advice(one: AbandonedRollout) -> str:
    if one.age_s is None:
        return "its age is not known: open another attempt and seal it to release it"
    return "--abandoned-age releases what is older than it says"


def _described(one: Removal) -> str:
    what = {
        "late": "staged calls without a record",
        "unrestored": "staged calls that were not restored",
        "drop": "staged calls, and takes no more",
        "log": "events: the log",
    }
    return f"{one.count} {what[one.kind]} of {one.tenant}/{one.capture_key}"
