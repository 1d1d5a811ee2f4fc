"""Cuts the power of a Staging service at many points and counts what a restart does not find.

kill -9 proves nothing about syncs, since the kernel keeps what a dead process wrote. Here the
service's system calls are recorded, and disks are built that hold what was synced and any part of
the rest, torn at sectors.

Usage: python -m tests.robustness.powercut [--images 500] [--calls 40]
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.robustness.disk import Disk
from tests.robustness.staging_victim import WRITERS
from tests.robustness.syscall_record import Event, Said, Write, read_record, strace

ROOT = Path(__file__).parents[2]
RECORD_S = 240
CHECK_S = 240
STORE = Path("state", "store")
"""Where the service keeps its store: in a new state directory, as at a first start."""
DETECTORS = ("forgetful", "forgetful-meta")
"""Settings that a store must not have; under each of them losses must be found."""


@dataclass(frozen=True, slots=True)
class PowerCuts:
    """What was found on the disks.

    Attributes:
        acknowledged: what the service acknowledged in all.
        images: power cuts.
        verdicts: how many disks were `intact`, `lost`, `corrupt` or `unopenable`.
        faults: the first words on each disk that was not intact.
    """

    acknowledged: int
    images: int
    verdicts: Counter[str]
    faults: list[str]


def cut_power(directory: Path, setting: str, *, images: int, calls: int, seed: int) -> PowerCuts:
    """Record one run of a service, and check as many disks as are wanted."""
    file = directory / STORE / "data.mdb"
    events = record(directory, file, setting, calls)
    said = [event.line for event in events if isinstance(event, Said)]
    assert said[-1] == "done", "the victim must live until its load is done"
    acknowledged = sum(line.startswith("staged ") for line in said)
    assert acknowledged == WRITERS * calls
    assert any(isinstance(event, Write) for event in events)
    requests = list(image_requests(directory, events, file, images, random.Random(seed)))
    command = [sys.executable, "-m", "tests.robustness.image_check"]
    checked = subprocess.run(
        command,
        input="".join(requests),
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=True,
    )
    verdicts = checked.stdout.splitlines()
    assert len(verdicts) == images, checked.stderr
    return PowerCuts(
        acknowledged,
        images,
        Counter(verdict.split()[0] for verdict in verdicts),
        [verdict for verdict in verdicts if verdict != "intact"],
    )


def named_in(directory: Path) -> list[Path]:
    """Give the directories whose entries lead from the directory of a run to its store's file."""
    return [directory, directory / STORE.parent, directory / STORE]


def record(directory: Path, file: Path, setting: str, calls: int) -> list[Event]:
    """Run a service under load and give what it asked of its store's file, in order."""
    log = directory / "strace"
    module = [sys.executable, "-m", "tests.robustness.staging_victim"]
    command = [*module, str(file.parent), str(directory / "socket"), setting, str(calls)]
    recorded = strace(log, command)
    subprocess.run(recorded, stdout=subprocess.DEVNULL, timeout=RECORD_S, check=True, cwd=ROOT)
    return read_record(log, file, named_in(directory))


def image_requests(
    directory: Path, events: Sequence[Event], file: Path, images: int, chance: random.Random
) -> Iterator[str]:
    """Lay down disks and what must be on them; give the checker's lines."""
    first = next(number for number, event in enumerate(events) if isinstance(event, Said))
    for number in range(images):
        cut = chance.randrange(first + 1, len(events) + 1)
        disk = Disk(named_in(directory))
        disk.apply(events[:cut])
        content = disk.after_power_cut(chance)
        image = directory / f"image-{number}"
        image.mkdir()
        if content is not None:
            (image / "data.mdb").write_bytes(content)
        expected = directory / f"image-{number}.json"
        expected.write_text(json.dumps(expectation(events[:cut])))
        yield f"{image} {expected}\n"


def expectation(events: Sequence[Event]) -> dict[str, object]:
    """Give what was acknowledged: calls by attempt with their digest, None where one is deleted.

    What was asked to go and is not yet acknowledged may be there or not.
    """
    calls: dict[str, dict[str, str | None]] = {}
    dropped: list[str] = []
    for event in events:
        if not isinstance(event, Said):
            continue
        verb, *words = event.line.split()
        if verb == "staged":
            capture_key, call_id, digest = words
            calls.setdefault(capture_key, {})[call_id] = digest
        elif verb == "deleting":
            for call_id in words[1:]:
                calls[words[0]].pop(call_id)
        elif verb == "deleted":
            calls[words[0]].update(dict.fromkeys(words[1:]))
        elif verb == "dropping":
            calls.pop(words[0])
        elif verb == "dropped":
            dropped.append(words[0])
    return {"calls": calls, "dropped": dropped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--calls", type=int, default=40, help="of each of the writers")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()

    def cut(setting: str) -> PowerCuts:
        with tempfile.TemporaryDirectory() as directory:
            cuts = cut_power(
                Path(directory), setting, images=chosen.images, calls=chosen.calls, seed=chosen.seed
            )
        found = f"{cuts.acknowledged} acknowledged, {cuts.images} power cuts: {dict(cuts.verdicts)}"
        print(f"{setting}: {found}", flush=True)
        return cuts

    durable = cut("durable")
    for fault in durable.faults[:5]:
        print(" ", fault)
    detected = {setting: len(cut(setting).faults) for setting in DETECTORS}
    result = {
        "cuts": durable.images,
        **{name: durable.verdicts[name] for name in ("lost", "corrupt", "unopenable")},
        "detector_losses": min(detected.values()),
    }
    print("RESULT " + json.dumps(result))
    sys.exit(bool(durable.faults) or not all(detected.values()))


if __name__ == "__main__":
    main()
