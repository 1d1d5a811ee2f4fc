"""A file that is replaced is the old one or the new one, never a part of either."""

from pathlib import Path

import pytest

from callforest_mesh.chassis.durable_file import replace_durably, replacing_durably


def test_what_is_written_piece_by_piece_appears_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_durably(path, b"old")
    with replacing_durably(path) as file:
        file.write(b"new ")
        assert path.read_bytes() == b"old"
        file.write(b"content")
    assert path.read_bytes() == b"new content"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def break_off(path: Path) -> None:
    with replacing_durably(path) as file:
        file.write(b"new")
        raise ZeroDivisionError


def test_what_fails_on_its_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_durably(path, b"old")
    with pytest.raises(ZeroDivisionError):
        break_off(path)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
