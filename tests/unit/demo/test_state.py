"""A demo empties what a demo made, and nothing else."""

from pathlib import Path

import pytest

from callforest_mesh.demo.loop import DemoFailedError
from callforest_mesh.demo.run import _clear


def test_what_somebody_else_wrote_is_kept(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.write_text("chapter 1")
    with pytest.raises(DemoFailedError, match="holds what no demo wrote"):
        _clear(tmp_path, keep="model")
    assert thesis.read_text() == "chapter 1"


def test_a_second_demo_begins_with_the_model_alone(tmp_path: Path) -> None:
    state = tmp_path / "new"
    _clear(state, keep="model")
    for name in ("model", "mesh"):
        (state / name).mkdir()
    (state / "callforest.yaml").touch()
    _clear(state, keep="model")
    assert [entry.name for entry in state.iterdir() if entry.name[0] != "."] == ["model"]
