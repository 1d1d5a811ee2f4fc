"""The last weight update, kept over a restart of the worker."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from callforest_mesh.chassis.directory import sync_names
from callforest_mesh.chassis.durable_file import replace_durably

_FILE = "weights.json"


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """Weights that were loaded.

    Attributes:
        path: the file they came from.
        version: what they are stamped as.
        sha256: digest of the file, 32 bytes.
        configuration_digest: of the engine that loaded it, 32 bytes; b"" until it has.
    """

    path: str
    version: int
    sha256: bytes
    configuration_digest: bytes = b""


def read_weight_record(directory: Path) -> WeightRecord | None:
    """Read the last update; None when there was none.

    Raises:
        ValueError: the record is damaged; the message names its file.
    """
    file = directory / _FILE
    try:
        fields = json.loads(file.read_bytes())
        return WeightRecord(
            str(fields["path"]),
            int(fields["version"]),
            bytes.fromhex(fields["sha256"]),
            bytes.fromhex(fields["configuration_digest"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no record of a weight update; remove it") from error


def write_weight_record(directory: Path, record: WeightRecord) -> None:
    """Write the last update so that a power cut leaves the old record or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    sync_names(directory)
    fields = {
        "path": record.path,
        "version": record.version,
        "sha256": record.sha256.hex(),
        "configuration_digest": record.configuration_digest.hex(),
    }
    replace_durably(directory / _FILE, json.dumps(fields).encode())


def digest_file(path: str) -> bytes:
    """Digest a file: SHA-256, 32 bytes.

    Raises:
        OSError: it cannot be read, or is no regular file: a pipe or a device has no end.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, "no regular file")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
