"""Admission opens attempts in the mode of the mesh, which is said in one place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.token_capture import TokenCapture
from callforest_mesh.mesh_options import admission_options


@pytest.mark.requirement("CFG-1")
@pytest.mark.parametrize("forest", [False, True])
def test_the_mode_is_that_of_token_capture(tmp_path: Path, forest: bool) -> None:
    capture = TokenCapture(forest_training=forest)
    configuration = MeshConfiguration(state_dir=tmp_path, token_capture=capture)
    assert admission_options(configuration).forest is forest
    own = dataclasses.replace(configuration, admission={"forest": not forest})
    with pytest.raises(ConfigurationError) as caught:
        admission_options(own)
    assert "token_capture.forest_training" in str(caught.value)
