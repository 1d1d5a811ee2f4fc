"""Safetensors headers: what an engine may load, judged before it touches its weights."""

import json
import struct
from pathlib import Path

import pytest

from callforest_mesh.worker.vllm.weight_file import (
    read_shapes,
    require_same_tensors,
    weight_files,
)


def write(path: Path, shapes: dict[str, list[int]], surplus: int = 0) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end + surplus))
    return path


def test_reads_names_and_shapes(tmp_path: Path) -> None:
    one = write(tmp_path / "1.safetensors", {"a": [2, 3], "b": []})
    two = write(tmp_path / "2.safetensors", {"c": [4]})
    assert weight_files(tmp_path) == [one, two]
    assert weight_files(one) == [one]
    assert read_shapes([one, two]) == {"a": (2, 3), "b": (), "c": (4,)}


def test_refuses_files_that_are_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for surplus in (-4, 4):
        write(path, {"a": [2]}, surplus)
        with pytest.raises(ValueError, match="its header says"):
            read_shapes([path])
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="too short"):
        read_shapes([path])
    path.write_bytes(struct.pack("<Q", 100) + b"{}")
    with pytest.raises(ValueError, match="cut short"):
        read_shapes([path])
    write(path, {"a": [2]})
    with pytest.raises(ValueError, match="repeats tensor a"):
        read_shapes([path, path])
    path.unlink()
    with pytest.raises(ValueError, match="holds no safetensors file"):
        weight_files(tmp_path)


@pytest.mark.requirement("TRN-10")
@pytest.mark.parametrize(
    "offered", [{"a": (1,)}, {"a": (1,), "b": (3,)}, {"a": (1,), "b": (2,), "c": ()}, {}]
)
def test_refuses_tensors_of_another_model(offered: dict[str, tuple[int, ...]]) -> None:
    expected = {"a": (1,), "b": (2,)}
    require_same_tensors(expected, dict(expected))
    with pytest.raises(ValueError, match="not this model's"):
        require_same_tensors(expected, offered)
