"""P1, durable ack: what Staging acknowledged is there after the power was cut."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.disk import Disk
from tests.robustness.powercut import STORE, cut_power, expectation
from tests.robustness.syscall_record import EntrySync, Said, Sync, Write, read_record

IMAGES = 50
FILE = Path("/stores/store/data.mdb")
DIRECTORIES = [Path("/stores/store"), Path("/stores")]
NAMED = [EntrySync(str(path)) for path in DIRECTORIES]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.requirement("CAP-6", "API-7")
def test_a_power_cut_loses_nothing_that_was_acknowledged(directory: Path) -> None:
    assert shutil.which("strace"), "the record of system calls needs strace"
    cuts = cut_power(directory, "durable", images=IMAGES, calls=15, seed=1)
    assert cuts.faults == []
    assert cuts.verdicts["intact"] == IMAGES


@pytest.mark.requirement("CAP-6", "API-7")
def test_nor_behind_a_start_that_was_killed_before_it_synced_a_name(directory: Path) -> None:
    """The next start finds the directories that it made, and nobody has synced their names."""
    (directory / STORE).mkdir(parents=True)
    cuts = cut_power(directory, "durable", images=10, calls=5, seed=1)
    assert cuts.faults == []


@pytest.mark.parametrize("setting", ["forgetful", "forgetful-meta"])
def test_a_forgetful_store_would_be_noticed(directory: Path, setting: str) -> None:
    cuts = cut_power(directory, setting, images=IMAGES, calls=15, seed=1)
    assert len(cuts.faults) >= 5


def after(*events, seed: int = 1) -> bytes | None:
    disk = Disk(DIRECTORIES)
    disk.apply(events)
    return disk.after_power_cut(random.Random(seed))


def test_a_disk_keeps_what_was_synced_and_any_part_of_the_rest() -> None:
    first, second = Write(0, b"a" * 2048, synced=False), Write(2048, b"b" * 2048, synced=False)
    kept = {after(*NAMED, first, Sync(), second, seed=seed) for seed in range(200)}
    assert all(content[:2048] == b"a" * 2048 for content in kept)
    assert {len(content) for content in kept} == {2048, 2560, 3072, 3584, 4096}
    assert after(*NAMED, Write(0, b"a", synced=True)) == b"a"
    assert {after(*NAMED, first, seed=seed) for seed in range(200)} >= {b"", b"a" * 2048}


def test_a_file_that_no_synced_directory_names_is_gone() -> None:
    content = Write(0, b"a", synced=True)
    assert after(content, NAMED[0]) is None
    assert after(content, NAMED[1]) is None


def test_what_is_asked_and_not_acknowledged_may_be_either() -> None:
    lines = ["staged r a 01", "staged r b 02", "deleting r a", "staged s a 03", "dropping s"]
    said = [Said(line) for line in lines]
    assert expectation(said) == {"calls": {"r": {"b": "02"}}, "dropped": []}
    done = [*said, Said("deleted r a"), Said("dropped s")]
    assert expectation(done) == {"calls": {"r": {"b": "02", "a": None}}, "dropped": ["s"]}


def test_a_record_is_read_in_the_order_of_its_threads(tmp_path: Path) -> None:
    def hexed(text: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in text.encode())

    (tmp_path / "log.1").write_text(
        f'1.000001 openat(AT_FDCWD, "{hexed(str(FILE))}", O_RDWR|O_CREAT, 0644) = 5\n'
        f'1.000002 openat(AT_FDCWD, "{hexed(str(FILE))}", O_RDWR|O_DSYNC, 0644) = 6\n'
        f'1.000003 pwrite64(5, "{hexed("ab")}", 2, 4096) = 2\n'
        f'1.000004 pwritev(5, [{{iov_base="{hexed("c")}", iov_len=1}},'
        f' {{iov_base="{hexed("d")}", iov_len=1}}], 2, 8192) = 2\n'
        "1.000005 fdatasync(5)                    = 0\n"
        f'1.000006 pwrite64(6, "{hexed("m")}", 1, 0) = 1\n'
        "1.000007 close(5) = 0\n"
        f'1.000009 openat(AT_FDCWD, "{hexed(str(FILE.parent))}", O_RDONLY|O_DIRECTORY) = 5\n'
        "1.000010 fsync(5) = 0\n"
        "1.000011 fsync(7) = -1 EIO (Input/output error)\n"
    )
    (tmp_path / "log.2").write_text(f'1.000008 write(1, "{hexed("staged")}", 6) = 6\n')
    assert read_record(tmp_path / "log", FILE, DIRECTORIES) == [
        Write(4096, b"ab", synced=False),
        Write(8192, b"cd", synced=False),
        Sync(),
        Write(0, b"m", synced=True),
        Said("staged"),
        EntrySync(str(FILE.parent)),
    ]


def test_a_record_of_calls_that_are_not_modelled_is_refused(tmp_path: Path) -> None:
    path = "".join(f"\\x{byte:02x}" for byte in str(FILE).encode())
    (tmp_path / "log.1").write_text(
        f'1.1 openat(AT_FDCWD, "{path}", O_RDWR, 0644) = 5\n1.2 ftruncate(5, 0) = 0\n'
    )
    with pytest.raises(AssertionError, match="ftruncate"):
        read_record(tmp_path / "log", FILE, DIRECTORIES)
