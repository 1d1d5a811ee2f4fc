"""Checkpoints: a directory that is whole or absent, checked to the last bit when it is read.

Layout: `weights.safetensors` and `optimizer.safetensors` (Megatron names, float32),
`generators.safetensors`, and `manifest.json` with the size and SHA-256 of each and a digest of
itself. No pickle.
"""

from __future__ import annotations

import enum
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from callforest_mesh.chassis.directory import sync_directory, sync_file
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.trainer.learner.architecture import Json

SCHEMA_VERSION = 5
"""The first that says of which capture mode its run is, and how its groups are padded."""
MANIFEST_FILE = "manifest.json"


class CheckpointRefusal(enum.Enum):
    """Why a checkpoint was refused."""

    EXISTS = "a checkpoint is never overwritten"
    ABSENT = "there is no whole checkpoint"
    MALFORMED = "the manifest cannot be read"
    OTHER_SCHEMA = "the checkpoint has another schema"
    CHANGED = "the checkpoint was changed after it was written"
    OTHER_MODEL = "the checkpoint is of another model"
    OTHER_RUN = (
        "the checkpoint is of a run that captures or pads otherwise; train on with its "
        "configuration, or begin anew without its checkpoints"
    )


class CheckpointRefusedError(Exception):
    """Nothing was written, or nothing was restored.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: CheckpointRefusal, fact: str = "") -> None:
        super().__init__(f"{refusal.value}: {fact}" if fact else refusal.value)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class RunShape:
    """What must be the same when a run goes on (TRN-7).

    Attributes:
        forest: its calls are of forest mode.
        row_multiple: its groups are padded to a multiple of so many rows.
    """

    forest: bool = False
    row_multiple: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands.

    Attributes:
        step: optimizer steps done.
        trained_cursor: position in the row log up to which groups are in the weights.
        weight_version: the highest ever issued; the next one exceeds it.
    """

    step: int
    trained_cursor: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        progress: where training stood.
        architecture_digest: of the model's configuration.
        shape: of the run.
        tensors: by file stem ("weights", "optimizer", "generators"), then by name.
    """

    progress: Progress
    architecture_digest: str
    shape: RunShape
    tensors: Mapping[str, Mapping[str, Tensor]]


STEMS = ("weights", "optimizer", "generators")


def write_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """Write durably: under a temporary name, every file synced, then renamed.

    Raises:
        CheckpointRefusedError: the directory exists.
        OSError: the disk refused; no checkpoint appeared.
    """
    if directory.exists():
        raise CheckpointRefusedError(CheckpointRefusal.EXISTS, directory.name)
    partial = directory.with_name(f".{directory.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    files: dict[str, Json] = {}
    for stem in STEMS:
        path = partial / f"{stem}.safetensors"
        save_file(dict(checkpoint.tensors[stem]), path)
        sync_file(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest_file(path)}
    progress = checkpoint.progress
    manifest: dict[str, Json] = {
        "schema_version": SCHEMA_VERSION,
        "step": progress.step,
        "trained_cursor": progress.trained_cursor,
        "weight_version": progress.weight_version,
        "architecture_digest": checkpoint.architecture_digest,
        **asdict(checkpoint.shape),
        "files": files,
    }
    manifest["digest"] = _digest_manifest(manifest)
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
    sync_file(partial / MANIFEST_FILE)
    sync_directory(partial)
    failpoint("trainer.before_rename")
    partial.rename(directory)
    failpoint("trainer.after_rename")
    sync_directory(directory.parent)


def read_checkpoint(directory: Path, architecture_digest: str, shape: RunShape) -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        directory: of the checkpoint.
        architecture_digest: of the model that is to go on.
        shape: of the run that is to go on.

    Raises:
        CheckpointRefusedError: absent, of another schema, model or run, or changed.
    """
    manifest = _read_manifest(directory)
    if manifest["architecture_digest"] != architecture_digest:
        raise CheckpointRefusedError(CheckpointRefusal.OTHER_MODEL)
    for name, own in asdict(shape).items():
        if manifest[name] != own:
            raise CheckpointRefusedError(
                CheckpointRefusal.OTHER_RUN, f"its {name} is {manifest[name]!r}, not {own!r}"
            )
    files = manifest["files"]
    if not isinstance(files, dict) or files.keys() != {f"{stem}.safetensors" for stem in STEMS}:
        raise CheckpointRefusedError(CheckpointRefusal.MALFORMED, "files")
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for stem in STEMS:
        path = directory / f"{stem}.safetensors"
        try:
            written: Json = {"bytes": path.stat().st_size, "sha256": _digest_file(path)}
            if written != files[path.name]:
                raise CheckpointRefusedError(CheckpointRefusal.CHANGED, path.name)
            tensors[stem] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointRefusedError(CheckpointRefusal.CHANGED, str(error)) from error
    progress = Progress(
        step=_count(manifest, "step"),
        trained_cursor=_count(manifest, "trained_cursor"),
        weight_version=_count(manifest, "weight_version"),
    )
    return Checkpoint(progress, architecture_digest, shape, tensors)


def _read_manifest(directory: Path) -> dict[str, Json]:
    """Read the manifest, its schema before its digest: another schema digests otherwise."""
    try:
        manifest: Json = json.loads((directory / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise CheckpointRefusedError(CheckpointRefusal.ABSENT, str(error)) from error
    except ValueError as error:
        raise CheckpointRefusedError(CheckpointRefusal.MALFORMED, str(error)) from error
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise CheckpointRefusedError(CheckpointRefusal.MALFORMED)
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise CheckpointRefusedError(
            CheckpointRefusal.OTHER_SCHEMA, f"{manifest['schema_version']}, not {SCHEMA_VERSION}"
        )
    claimed = manifest.pop("digest", None)
    if claimed != _digest_manifest(manifest):
        raise CheckpointRefusedError(CheckpointRefusal.CHANGED, MANIFEST_FILE)
    return manifest


def _count(manifest: Mapping[str, Json], name: str) -> int:
    value = manifest[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointRefusedError(CheckpointRefusal.MALFORMED, f"{name} is {value!r}")
    return value


def _digest_manifest(manifest: Mapping[str, Json]) -> str:
    return hashlib.sha256(
        json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
