"""The chaos run as a command: the callers' points, the trainer's points, a large store, and
the proof that losses would be noticed.

DEPTH says how often each point of a caller is hit, and how long the rest takes; 5 is the bar. The
callers take turns: odd seeds play chain mode, even ones forest mode, unless a mode is named. Each
part prints its own figures; the last line has the sums, and the slowest recovery of grown stores.

Usage: python -m tests.robustness.chaos [--depth 5] [--seed 1] [--parts NAMES] [--mode NAME]
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
from typing import TypeAlias

from tests.robustness.chaos_judge import Verdict
from tests.robustness.chaos_points import Target
from tests.robustness.chaos_recovery import measure_recovery
from tests.robustness.chaos_run import STORES, ChaosOptions, every_point, run_chaos
from tests.robustness.rollout_load import LoadOptions

STORE_BYTES = 1 << 30
RECOVERY_MOST_S = 2.0
MASKED_MOST = 0.25
"""The largest share of rollouts that deaths may cost: to mask is safe, but proves little."""
SUMMED = (
    *("kills", "lost", "duplicated", "changed", "wrong_parents", "resampled_after_staging"),
    *("failpoints_hit", "failpoints", "rollouts", "masked_rollouts", "staged_left"),
)
Figures: TypeAlias = dict[str, object]
MODES = ("forest", "chain")
"""Even seeds are of forest mode, odd ones of chain mode."""
FEW = LoadOptions(groups=2, group_size=4, at_once=8, attempts_most=500)
"""A load that leaves the machine to a trainer that starts again and again."""


def is_forest(seed: int, mode: str = "") -> bool:
    """Say whether a run of the callers is of forest mode: by its seed, unless a mode is named."""
    return (mode or MODES[seed % 2]) == "forest"


async def callers(directory: Path, depth: int, seed: int, mode: str) -> tuple[bool, Figures]:
    """Strike every service but the trainer; say whether all was well, and the figures."""
    options = ChaosOptions(
        every_point(depth), random_kills=3 * depth, seed=seed, forest=is_forest(seed, mode)
    )
    return await struck(directory, options)


async def trainer(directory: Path, depth: int, seed: int, _: str) -> tuple[bool, Figures]:
    """Strike the trainer and its learner at their points; say whether all was well, and how."""
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


async def detector(directory: Path, depth: int, seed: int, _: str) -> tuple[bool, Figures]:
    """Prove that what goes wrong would be noticed; say whether it was.

    Losses of each store, histories that are not known, and loss that has two owners.
    """

    async def found(name: str, options: ChaosOptions) -> Verdict:
        (directory / name).mkdir()
        return (await run_chaos(directory / name, options)).verdict

    lost = {store: len((await found(store, early(store))).faults.lost) for store in STORES}
    roots = len((await found("roots", flawed("forgets-histories"))).wrong_parents)
    owners = len((await found("owners", flawed("owns-twice"))).faults.duplicated)
    figures: Figures = {
        "lost_when_acknowledged_too_early": lost,
        "wrong_parents_when_histories_are_forgotten": roots,
        "losses_doubled_when_rows_own_twice": owners,
    }
    return all((*lost.values(), roots, owners)), figures


async def struck(directory: Path, options: ChaosOptions) -> tuple[bool, Figures]:
    """Do a run and print what is wrong; say whether all was well, and the figures."""
    run = await run_chaos(directory, options)
    for target in sorted(run.wanted - run.hits):
        print(f"not hit often enough: {target.point} of {target.service}")
    for fault in run.verdict.all():
        print(fault)
    figures = run.result()
    receipts = run.load.history.receipts.values()
    masked = sum(one.masked for one in receipts)
    if is_costly := masked > MASKED_MOST * len(receipts):
        print(f"{masked} of {len(receipts)} rollouts are masked")
    faults = run.verdict.all() or run.wanted - run.hits or run.staged_left
    return not (faults or is_costly), figures


async def recovery(directory: Path, depth: int, seed: int, _: str) -> tuple[bool, Figures]:
    """Kill the services of grown stores; say whether each served again in time, and when."""
    deaths = await measure_recovery(directory, size=STORE_BYTES, kills=depth, seed=seed)
    proven = [death for death in deaths if death.target is not None]
    slowest = {
        name: round(max(one.recovery_s for one in proven if one.service == name), 2)
        for name in STORES
    }
    figures: Figures = {
        "kills": len(proven),
        "store_bytes": STORE_BYTES,
        "recovery_s_max_by_service": slowest,
        "recovery_s_max": max(slowest.values()),
    }
    return max(slowest.values()) <= RECOVERY_MOST_S, figures


PARTS: dict[str, Callable[[Path, int, int, str], Awaitable[tuple[bool, Figures]]]] = {
    "callers": callers,
    "trainer": trainer,
    "recovery": recovery,
    "detector": detector,
}


def summed(parts: dict[str, Figures]) -> Figures:
    """Give the sums over all parts, the slowest recovery of grown stores, the detector's finds."""
    result: Figures = {}
    for name in SUMMED:
        counts = [count for part in parts.values() if isinstance(count := part.get(name), int)]
        if counts:
            result[name] = sum(counts)
    if "recovery" in parts:
        result["recovery_s_max"] = parts["recovery"]["recovery_s_max"]
    return result | parts.get("detector", {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=int(os.environ.get("DEPTH", "5")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--mode", choices=MODES, default="", help="of callers; by the seed else")
    chosen = parser.parse_args()
    well = True
    parts: dict[str, Figures] = {}
    for name in chosen.parts.split(","):
        print(f"chaos: {name}, depth {chosen.depth}, seed {chosen.seed}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            part = PARTS[name](Path(directory), chosen.depth, chosen.seed, chosen.mode)
            is_well, parts[name] = asyncio.run(_waited(part))
            well = is_well and well
        print(f"{name}: {json.dumps(parts[name])}", flush=True)
    print("RESULT " + json.dumps(summed(parts)), flush=True)
    sys.exit(not well)


async def _waited(part: Awaitable[tuple[bool, Figures]]) -> tuple[bool, Figures]:
    return await part


if __name__ == "__main__":
    main()
