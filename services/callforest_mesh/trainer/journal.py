"""What the trainer must remember across its own death: versions issued, checkpoints written.

A weight version is durable here before the first worker hears of it, so that no version is ever
issued twice, whatever the checkpoint says (TRN-10).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from callforest_mesh.chassis.directory import sync_directory, sync_names
from callforest_mesh.chassis.durable_file import replace_durably
from callforest_mesh.chassis.failpoint import failpoint

_ISSUED = "issued_weight_version.json"
_CHECKPOINT = re.compile(r"^step-(\d{9})$")


class TrainerJournal:
    """Files under one directory; every write is durable when it returns.

    Args:
        directory: the trainer's state directory; made when missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checkpoints = directory / "checkpoints"
        self._weights = directory / "weights"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._weights.mkdir(parents=True, exist_ok=True)
        # A directory that a power cut takes away would take the issued versions with it.
        sync_names(directory)

    def issued_version(self) -> int:
        """Give the highest weight version ever issued; 0 before the first.

        Raises:
            ValueError: the file is damaged. Only a person can say what was issued.
        """
        path = self._directory / _ISSUED
        if not path.exists():
            return 0
        noted: object = json.loads(path.read_text())
        issued = noted.get("weight_version") if isinstance(noted, dict) else None
        if not isinstance(issued, int) or isinstance(issued, bool) or issued < 0:
            raise ValueError(f"{path.name} does not hold a version")
        return issued

    def issue_version(self, version: int) -> None:
        """Remember that a version is about to be issued.

        Raises:
            ValueError: it does not exceed every version issued before.
        """
        if version <= self.issued_version():
            raise ValueError(f"weight version {version} was issued before")
        note = json.dumps({"weight_version": version})
        replace_durably(self._directory / _ISSUED, note.encode())
        failpoint("trainer.after_issue")

    def weights_path(self, version: int) -> Path:
        """Name the file that holds a version's weights."""
        return self._weights / f"version-{version:09d}.safetensors"

    def forget_weights_before(self, version: int) -> None:
        """Remove the weights of older versions; a restarted worker needs only the last."""
        failpoint("trainer.after_push")
        for path in self._weights.glob("version-*.safetensors"):
            if path != self.weights_path(version):
                path.unlink()

    def checkpoint_path(self, step: int) -> Path:
        """Name the directory of a step's checkpoint."""
        return self._checkpoints / f"step-{step:09d}"

    def checkpoints(self) -> list[Path]:
        """List the checkpoints, the newest first."""
        found = [path for path in self._checkpoints.iterdir() if _CHECKPOINT.match(path.name)]
        return sorted(found, reverse=True)

    def newest_checkpoint(self) -> Path | None:
        """Give the newest checkpoint, under a name that survives a power cut; None without one.

        A learner that was killed behind its rename left that open, and a cursor may be committed
        only behind what stays.
        """
        sync_directory(self._checkpoints)
        return next(iter(self.checkpoints()), None)

    def forget_checkpoints(self, *, keep: int) -> None:
        """Remove all but the newest checkpoints."""
        for path in self.checkpoints()[keep:]:
            shutil.rmtree(path)
