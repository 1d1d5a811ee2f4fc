"""How attempts are captured and what of them trains is said in one place for all services."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.token_capture import TokenCapture
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.mesh_options import admission_options, finalizer_options, gateway_options


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
    assert gateway_options(configuration).forest is forest
    for key, place in (("forest", "token_capture.forest_training"), ("tenant", "tenant")):
        own = dataclasses.replace(configuration, gateway={key: getattr(GatewayOptions(), key)})
        with pytest.raises(ConfigurationError, match=rf"gateway\.{key}: is {place}"):
            gateway_options(own)


@pytest.mark.requirement("CFG-1", "SEL-4", "FIN-5")
@pytest.mark.parametrize("policy", ["all_captured", "tests.unit.finalizer.harness_policies:alters"])
def test_what_trains_is_that_of_token_capture(tmp_path: Path, policy: str) -> None:
    capture = TokenCapture(
        forest_training=True, selection_policy=policy, min_valid_fraction_per_group=0.75
    )
    configuration = MeshConfiguration(state_dir=tmp_path, token_capture=capture)
    options = finalizer_options(configuration)
    assert (options.selection_policy, options.min_valid_fraction_per_group) == (policy, 0.75)
    assert options.incomplete_capture == "mask"
    salvages = dataclasses.replace(capture, incomplete_capture="train_verified_paths")
    chosen = dataclasses.replace(configuration, token_capture=salvages)
    assert finalizer_options(chosen).incomplete_capture == "train_verified_paths"
    for key, value in (
        ("selection_policy", policy),
        ("min_valid_fraction_per_group", 0.75),
        ("incomplete_capture", "mask"),
    ):
        own = dataclasses.replace(configuration, finalizer={key: value})
        with pytest.raises(ConfigurationError) as caught:
            finalizer_options(own)
        assert (caught.value.key, f"token_capture.{key}" in str(caught.value)) == (
            f"finalizer.{key}",
            True,
        )


@pytest.mark.requirement("SEL-4")
@pytest.mark.parametrize("name", ["no_such.training:pick", "json:no_such", "json:__all__"])
def test_a_policy_that_is_not_there_is_refused_when_the_configuration_is_read(
    tmp_path: Path, name: str
) -> None:
    capture = TokenCapture(forest_training=True, selection_policy=name)
    with pytest.raises(ConfigurationError) as caught:
        finalizer_options(MeshConfiguration(state_dir=tmp_path, token_capture=capture))
    assert caught.value.key == "token_capture.selection_policy"
