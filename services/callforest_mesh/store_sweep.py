"""`callforest gc`: removes what no training can need any more, beside running services.

The plan is made from snapshots of the stores; what is removed, its own service removes. A plan that
is minutes old is as right as a new one, since it rests on nothing that can be undone: a sealed
attempt gets no row, a superseded one is never finalized, a consumed group is never sent again. So a
sweep may be repeated, killed anywhere, or run twice at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.finalizer.inventory import FinalizerInventory
from callforest_mesh.ledger.inventory import LoggedAttempt
from callforest_mesh.staging.inventory import StagedInventory
from callforest_mesh.store_set import StoreSet


@dataclass(frozen=True, slots=True)
class SweepPolicy:
    """How old what is removed must be, in seconds behind the admission of an attempt's last call.

    Attributes:
        late_s: bytes without a record, and whole superseded attempts: the settle deadline and an
            age beyond it (LED-8).
        log_s: logs of attempts whose group was consumed.
    """

    late_s: float
    log_s: float


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to remove.

    Attributes:
        kind: `late`: staged calls of a sealed attempt that have no record. `drop`: all that a
            consumed or superseded attempt staged, for good. `log`: the log of a consumed attempt.
        tenant: owns the attempt.
        capture_key: names it.
        call_ids: the calls, of `late` alone.
        count: calls, or events of a log.
    """

    kind: Literal["late", "drop", "log"]
    tenant: str
    capture_key: str
    call_ids: tuple[str, ...]
    count: int


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
    with StoreSet(paths) as stores:
        found = list(plan(stores, policy, now_s=now_s))
    removals = [one for one in found if isinstance(one, Removal)]
    faults = [one for one in found if isinstance(one, StoreFault)]
    if apply:
        asyncio.run(_apply(configuration, removals))
    verb = "removed" if apply else "would remove"
    lines = [f"fault  {fault.key}  {fault.text}; left alone" for fault in faults]
    lines += [f"{verb} {_described(one)}" for one in removals]
    counts: dict[str, object] = {"applied": apply, "faults": len(faults)}
    for kind in ("late", "drop", "log"):
        chosen = [one.count for one in removals if one.kind == kind]
        counts |= {f"{kind}_attempts": len(chosen), f"{kind}_records": sum(chosen)}
    if removals and not apply:
        lines.append("nothing was removed: say --apply to do it")
    return [*lines, f"RESULT {json.dumps(counts)}"], 1 if faults else 0


def plan(stores: StoreSet, policy: SweepPolicy, *, now_s: float) -> Iterator[Removal | StoreFault]:
    """Find what no training can need any more; an attempt whose log is damaged is left alone."""
    staging, ledger, finalizer = stores.staging, stores.ledger, stores.finalizer
    if staging is None or ledger is None or finalizer is None:
        raise StoreAbsentError("gc needs the stores of Staging, Ledger and Finalizer")
    for _, attempt in ledger.attempts():
        if isinstance(attempt, StoreFault):
            yield attempt
        elif attempt.view.state == attempt_pb2.ATTEMPT_STATE_SEALED:
            yield from _of_attempt(
                attempt, staging, finalizer, policy, now_s - attempt.last_admit_s
            )


def _of_attempt(
    attempt: LoggedAttempt,
    staging: StagedInventory,
    finalizer: FinalizerInventory,
    policy: SweepPolicy,
    age_s: float,
) -> Iterator[Removal]:
    """Find what of a sealed attempt can go."""
    tenant, capture_key = attempt.key.tenant, attempt.key.capture_key
    # Not merely consumed: until it is cleaned, the finalizer itself is at work on it.
    done = finalizer.is_cleaned(tenant, attempt.view.opened.rollout_id)
    staged = staging.call_ids(tenant, capture_key)
    is_late = age_s > policy.late_s
    forget = done and age_s > policy.log_s
    # A dropped attempt takes nothing more; one whose log goes must be, or its bytes were orphans.
    if (staged and (done or (attempt.superseded and is_late))) or (
        forget and not staging.is_dropped(tenant, capture_key)
    ):
        yield Removal("drop", tenant, capture_key, (), len(staged))
    elif is_late:
        committed = {record.coords.call_id for record in attempt.records}
        late = tuple(call_id for call_id in staged if call_id not in committed)
        if late:
            yield Removal("late", tenant, capture_key, late, len(late))
    if forget:
        yield Removal("log", tenant, capture_key, (), attempt.view.revision)


async def _apply(configuration: MeshConfiguration, removals: list[Removal]) -> None:
    """Have the services remove it: of an attempt, first what it staged, then its log."""
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        staging, ledger = clients.staging(), clients.ledger()
        for one in removals:
            if one.kind == "late":
                await staging.for_tenant(one.tenant).delete(one.capture_key, one.call_ids)
            elif one.kind == "drop":
                await staging.for_tenant(one.tenant).drop_partition(one.capture_key)
            else:
                await ledger.for_tenant(one.tenant).forget(one.capture_key)


def _described(one: Removal) -> str:
    what = {
        "late": "staged calls without a record",
        "drop": "staged calls, and takes no more",
        "log": "events: the log",
    }
    return f"{one.count} {what[one.kind]} of {one.tenant}/{one.capture_key}"
