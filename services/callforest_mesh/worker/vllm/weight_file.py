"""Safetensors files by their headers: what tensors they hold, read without loading any."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

TensorShapes: TypeAlias = dict[str, tuple[int, ...]]

_HEADER_BYTES_MOST = 100_000_000


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that `path` names: itself, or those in it.

    Raises:
        ValueError: the directory holds none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no safetensors file")
    return files


def read_shapes(files: Iterable[Path]) -> TensorShapes:
    """Return name and shape of every tensor in the files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no safetensors file, is cut short, or repeats a tensor.
    """
    shapes: TensorShapes = {}
    for path in files:
        for name, shape in _read_header(path).items():
            if name in shapes:
                raise ValueError(f"{path.name} repeats tensor {name}")
            shapes[name] = shape
    return shapes


def require_same_tensors(expected: TensorShapes, offered: TensorShapes) -> None:
    """Refuse weights that would leave a part of the model at its old values.

    Raises:
        ValueError: names or shapes differ; the message names the first few.
    """
    if expected == offered:
        return
    missing = sorted(expected.keys() - offered.keys())
    foreign = sorted(offered.keys() - expected.keys())
    other = sorted(n for n in expected.keys() & offered.keys() if expected[n] != offered[n])
    message = (
        f"the weights are not this model's: missing {missing[:3]}, foreign {foreign[:3]}, "
        f"of another shape {other[:3]}"
    )
    raise ValueError(message)


def _read_header(path: Path) -> TensorShapes:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path.name} is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_HEADER_BYTES_MOST, size - 8):
            raise ValueError(f"{path.name} is no safetensors file, or is cut short")
        header = json.loads(file.read(length))
    shapes: TensorShapes = {}
    end = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            shapes[name] = tuple(tensor["shape"])
            end = max(end, tensor["data_offsets"][1])
    if 8 + length + end != size:
        raise ValueError(f"{path.name} holds {size} bytes, its header says {8 + length + end}")
    return shapes
