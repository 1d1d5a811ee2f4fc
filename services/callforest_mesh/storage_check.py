"""Can the state directory hold what must survive a power cut?"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from callforest_mesh.chassis.directory import sync_directory
from callforest_mesh.finding import Finding, bad, good

_NETWORKED: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "afs", "glusterfs"}
)
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
SPACE_LEAST: Final = 1 << 30
SYNCS: Final = 20
SYNC_MOST_S: Final = 0.05
"""Each answer waits for a sync or two; beyond this, calls wait for the disk more than they work."""
CLOCK_MOST_S: Final = 2.0


def examine(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Iterator[Finding]:
    """Check a state directory, which is made if it is not there.

    Args:
        path: the directory.
        mounts: lists the mounted file systems.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        seconds = _measure_syncs(path)
        sync_directory(path)
        skew_s = _clock_skew(path)
        space = os.statvfs(path)
    except OSError as error:
        text = f"{path}: {error.strerror}; set state_dir to a writable directory"
        yield bad("state_dir", text)
        return
    yield good("state_dir", f"{path} is writable, and fsync works")
    yield file_system(path, kind_of(path, mounts))
    yield space_left(space.f_bavail * space.f_frsize)
    yield sync_time(seconds)
    yield clock(skew_s)


def file_system(path: Path, kind: str) -> Finding:
    """Judge the file system that the stores are on."""
    if kind in _NETWORKED:
        text = f"{path} is on {kind}: the stores need a local file system; move state_dir"
        return bad("file system", text)
    if kind in _VOLATILE:
        text = f"{path} is on {kind}: nothing there survives a restart; move state_dir"
        return bad("file system", text)
    if kind == "overlay":
        text = "overlay: what a container writes goes with it; mount a volume for what must stay"
        return good("file system", text)
    return good("file system", kind or "unknown")


def space_left(free_bytes: int) -> Finding:
    """Judge how much can still be stored."""
    text = f"{free_bytes >> 20} MiB are free"
    if free_bytes < SPACE_LEAST:
        return bad("space", f"{text}: at least 1 GiB is needed; free some, or move state_dir")
    return good("space", text)


def sync_time(seconds: list[float]) -> Finding:
    """Judge how long the disk takes to keep 4 KiB."""
    median, longest = statistics.median(seconds), max(seconds)
    text = f"a sync takes {median * 1e3:.1f} ms, at most {longest * 1e3:.1f} ms of {len(seconds)}"
    if median > SYNC_MOST_S:
        return bad("sync", f"{text}: every call waits for it; move state_dir to a faster disk")
    return good("sync", text)


def clock(skew_s: float, now: Callable[[], float] = time.time) -> Finding:
    """Judge the clock: admit times, and so the heuristic and certificates, rely on it.

    Args:
        skew_s: seconds by which a new file's time is ahead of the clock.
        now: the clock, seconds since the epoch.
    """
    installed = Path(__file__).stat().st_mtime
    if now() < installed - 24 * 3600:
        return bad("clock", "it is set before this program was installed: let NTP set it")
    if abs(skew_s) > CLOCK_MOST_S:
        text = f"files of state_dir are dated {skew_s:+.0f} s off the clock: let NTP set both"
        return bad("clock", text)
    return good("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now())))


def kind_of(path: Path, mounts: Path) -> str:
    """Name the file system of a path, "" when it cannot be told."""
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    resolved = f"{path.resolve()}/"
    for line in lines:
        _, escaped, found, *_ = line.split(" ")
        point = escaped.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if resolved.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, found
    return kind


def _measure_syncs(path: Path) -> list[float]:
    """Write and sync a page again and again, as a store's log does."""
    seconds = []
    with tempfile.TemporaryFile(dir=path, prefix=".doctor-") as file:
        for _ in range(SYNCS):
            begun = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begun)
    return seconds


def _clock_skew(path: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-") as file:
        return os.fstat(file.fileno()).st_mtime - time.time()
