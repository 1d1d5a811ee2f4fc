"""What the trainer remembers across its own death."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from callforest_mesh.trainer.journal import TrainerJournal

# Issues versions as the trainer does and says each one aloud only after it was issued: what a
# worker would have heard of. It dies by SIGKILL right before the push it was told to die at.
TRAINER = """
import os, signal, sys
from pathlib import Path
from callforest_mesh.trainer.journal import TrainerJournal

journal = TrainerJournal(Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    version = journal.issued_version() + 1
    journal.issue_version(version)
    if _ == int(sys.argv[2]) - 1 and sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    print(version, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_was_issued_at_first(tmp_path: Path) -> None:
    journal = TrainerJournal(tmp_path / "made" / "here")
    assert (journal.issued_version(), journal.checkpoints()) == (0, [])


def test_a_version_is_issued_once(tmp_path: Path) -> None:
    journal = TrainerJournal(tmp_path)
    journal.issue_version(1)
    journal.issue_version(5)
    for version in (5, 4, 1, 0):
        with pytest.raises(ValueError, match="issued before"):
            journal.issue_version(version)
    assert TrainerJournal(tmp_path).issued_version() == 5


@pytest.mark.parametrize("moment", ["before", "after"])
def test_versions_never_repeat_over_a_kill(tmp_path: Path, moment: str) -> None:
    """A trainer that dies between issue and push leaves a version that is never used again."""
    heard: list[int] = []
    for life in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", TRAINER, str(tmp_path), "2", moment],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        heard += [int(line) for line in ended.stdout.split()]
        assert TrainerJournal(tmp_path).issued_version() == 2 * (life + 1)
    assert heard == ([1, 3, 5] if moment == "before" else [1, 2, 3, 4, 5, 6])


def test_a_half_written_note_does_not_count(tmp_path: Path) -> None:
    journal = TrainerJournal(tmp_path)
    journal.issue_version(3)
    (tmp_path / "issued_weight_version.json.new").write_text('{"weight_ver')
    again = TrainerJournal(tmp_path)
    assert again.issued_version() == 3
    again.issue_version(4)
    assert journal.issued_version() == 4


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "{}", '{"weight_version": -1}', '{"weight_version": true}']
)
def test_a_damaged_note_is_for_a_person_to_mend(tmp_path: Path, text: str) -> None:
    journal = TrainerJournal(tmp_path)
    (tmp_path / "issued_weight_version.json").write_text(text)
    with pytest.raises(ValueError, match=r"version|Expecting"):
        journal.issued_version()
    with pytest.raises(ValueError, match=r"version|Expecting"):
        journal.issue_version(9)


def test_the_note_is_synced_before_and_after_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = TrainerJournal(tmp_path)
    seen: list[str] = []
    sync, replace = os.fsync, Path.replace

    def recording(descriptor: int) -> None:
        seen.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    def naming(self: Path, target: Path) -> Path:
        seen.append("named")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(Path, "replace", naming)
    journal.issue_version(1)
    note = str(tmp_path / "issued_weight_version.json.new")
    assert seen == [note, "named", str(tmp_path)]
    assert json.loads((tmp_path / "issued_weight_version.json").read_text()) == {
        "weight_version": 1
    }


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced."""
    paths: list[str] = []
    sync = os.fsync

    def recording(descriptor: int) -> None:
        paths.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    return paths


@pytest.mark.parametrize("made_before", ["", "a", "a/b"])
def test_every_name_that_leads_to_the_directory_is_synced(
    tmp_path: Path, synced: list[str], made_before: str
) -> None:
    """A start that was killed may have made any of them, and did not sync it."""
    (tmp_path / made_before).mkdir(parents=True, exist_ok=True)
    TrainerJournal(tmp_path / "a" / "b")
    assert synced[:3] == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]


@pytest.mark.requirement("FIN-4", "TRN-7")
def test_a_checkpoint_that_a_killed_learner_named_is_synced_before_it_counts(
    tmp_path: Path, synced: list[str]
) -> None:
    """Behind the rename there was no sync, and a cursor is committed behind what is restored."""
    journal = TrainerJournal(tmp_path)
    assert journal.newest_checkpoint() is None
    for step in (3, 4):
        journal.checkpoint_path(step).mkdir()
    synced.clear()
    assert journal.newest_checkpoint() == journal.checkpoint_path(4)
    assert synced == [str(tmp_path / "checkpoints")]


def test_checkpoints_are_listed_newest_first_and_only_whole_ones(tmp_path: Path) -> None:
    journal = TrainerJournal(tmp_path)
    for step in (9, 10, 100):
        journal.checkpoint_path(step).mkdir()
    (tmp_path / "checkpoints" / ".step-000000200.partial").mkdir()
    assert journal.checkpoints() == [journal.checkpoint_path(step) for step in (100, 10, 9)]
    journal.forget_checkpoints(keep=2)
    assert journal.checkpoints() == [journal.checkpoint_path(step) for step in (100, 10)]


def test_only_the_last_weights_stay(tmp_path: Path) -> None:
    journal = TrainerJournal(tmp_path)
    for version in (1, 2, 3):
        journal.weights_path(version).write_bytes(b"w")
    journal.forget_weights_before(3)
    assert list((tmp_path / "weights").iterdir()) == [journal.weights_path(3)]
