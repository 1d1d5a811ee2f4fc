"""The chaos run as a command: the callers' points, the trainer's points, a large store, and
the proof that losses would be noticed.

DEPTH says how often each point of a caller is hit, and how long the rest takes; 5 is the bar. The
callers take turns: odd seeds play chain mode, even ones forest mode, unless a mode is named.

Usage: python -m tests.robustness.chaos [--depth 1] [--seed 1] [--parts NAMES] [--mode NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.robustness.chaos_judge import Verdict
from tests.robustness.chaos_points import Target
from tests.robustness.chaos_recovery import measure_recovery
from tests.robustness.chaos_run import STORES, ChaosOptions, every_point, run_chaos
from tests.robustness.rollout_load import LoadOptions

STORE_BYTES = 1 << 30
RECOVERY_MOST_S = 2.0
MODES = ("forest", "chain")
"""Even seeds are of forest mode, odd ones of chain mode."""
FEW = LoadOptions(groups=2, group_size=4, at_once=8, attempts_most=500)
"""A load that leaves the machine to a trainer that starts again and again."""


def is_forest(seed: int, mode: str = "") -> bool:
    """Say whether a run of the callers is of forest mode: by its seed, unless a mode is named."""
    return (mode or MODES[seed % 2]) == "forest"


async def callers(directory: Path, depth: int, seed: int, mode: str) -> bool:
    """Strike every service but the trainer; say whether all was well."""
    options = ChaosOptions(
        every_point(depth), random_kills=3 * depth, seed=seed, forest=is_forest(seed, mode)
    )
    return await struck(directory, options)


async def trainer(directory: Path, depth: int, seed: int, _: str) -> bool:
    """Strike the trainer and its learner at their points; say whether all was well."""
    wanted = every_point((depth + 2) // 3, ("trainer",))
    options = ChaosOptions(wanted, random_kills=1, load=FEW, seed=seed)
    return await struck(directory, options)


def early(store: str) -> ChaosOptions:
    """Let the stores acknowledge too early, and kill one between the answer and the commit."""
    return ChaosOptions(
        Counter({Target(store, "store.before_commit"): 2}),
        random_kills=0,
        load=FEW,
        seed=2,
        flaw="acknowledges-before-commit",
        settle_s=2.0,
        end_s=5.0,
    )


def flawed(flaw: str) -> ChaosOptions:
    """Play forest mode on services with a flaw that no death brings out."""
    wanted = Counter({Target("worker", "worker.after_stage"): 2})
    return ChaosOptions(
        wanted, random_kills=0, load=FEW, seed=2, forest=True, flaw=flaw, end_s=15.0
    )


async def detector(directory: Path, depth: int, seed: int, _: str) -> bool:
    """Prove that what goes wrong would be noticed; say whether it was.

    Losses of each store, histories that are not known, and loss that has two owners.
    """

    async def found(name: str, options: ChaosOptions) -> Verdict:
        (directory / name).mkdir()
        return (await run_chaos(directory / name, options)).verdict

    lost = {store: len((await found(store, early(store))).faults.lost) for store in STORES}
    roots = len((await found("roots", flawed("forgets-histories"))).wrong_parents)
    owners = len((await found("owners", flawed("owns-twice"))).faults.duplicated)
    figures = {
        "lost_when_acknowledged_too_early": lost,
        "wrong_parents_when_histories_are_forgotten": roots,
        "losses_doubled_when_rows_own_twice": owners,
    }
    print("RESULT " + json.dumps(figures), flush=True)
    return all((*lost.values(), roots, owners))


async def struck(directory: Path, options: ChaosOptions) -> bool:
    """Do a run, print what is wrong and its figures; say whether all was well."""
    run = await run_chaos(directory, options)
    for target in sorted(run.wanted - run.hits):
        print(f"not hit often enough: {target.point} of {target.service}")
    for fault in run.verdict.all():
        print(fault)
    print("RESULT " + json.dumps(run.result()), flush=True)
    return not (run.verdict.all() or run.wanted - run.hits or run.staged_left)


async def recovery(directory: Path, depth: int, seed: int, _: str) -> bool:
    """Kill the services of grown stores; say whether each served again in time."""
    deaths = await measure_recovery(directory, size=STORE_BYTES, kills=depth, seed=seed)
    proven = [death for death in deaths if death.target is not None]
    slowest = {
        name: round(max(one.recovery_s for one in proven if one.service == name), 2)
        for name in STORES
    }
    figures = {
        "kills": len(proven),
        "store_bytes": STORE_BYTES,
        "recovery_s_max_by_service": slowest,
        "recovery_s_max": max(slowest.values()),
    }
    print("RESULT " + json.dumps(figures), flush=True)
    return max(slowest.values()) <= RECOVERY_MOST_S


PARTS: dict[str, Callable[[Path, int, int, str], Awaitable[bool]]] = {
    "callers": callers,
    "trainer": trainer,
    "recovery": recovery,
    "detector": detector,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=int(os.environ.get("DEPTH", "1")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--mode", choices=MODES, default="", help="of callers; by the seed else")
    chosen = parser.parse_args()
    well = True
    for name in chosen.parts.split(","):
        print(f"chaos: {name}, depth {chosen.depth}, seed {chosen.seed}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            part = PARTS[name](Path(directory), chosen.depth, chosen.seed, chosen.mode)
            well = asyncio.run(_waited(part)) and well
    sys.exit(not well)


async def _waited(part: Awaitable[bool]) -> bool:
    return await part


if __name__ == "__main__":
    main()
