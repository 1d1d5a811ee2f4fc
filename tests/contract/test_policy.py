"""deploy/policy.yaml names every RPC of the schemas, and no other."""

from pathlib import Path

import pytest
import yaml

from tests.robustness.fuzz_rpc import methods

POLICY = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "policy.yaml").read_text())
OTHERS = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}


@pytest.mark.requirement("API-6")
def test_every_rpc_is_allowed_to_somebody() -> None:
    named = {rpc for allowed in POLICY["roles"].values() for rpc in allowed}
    assert named == {method.path for method in methods()}


def test_what_is_not_named_is_denied() -> None:
    assert POLICY["default"] == "deny"
    assert set(POLICY) == {"default", "roles", "everyone"}
    assert set(POLICY["everyone"]) == OTHERS
    assert not any("*" in rpc for allowed in POLICY["roles"].values() for rpc in allowed)


def test_no_role_names_an_rpc_twice() -> None:
    assert all(len(set(allowed)) == len(allowed) for allowed in POLICY["roles"].values())


def test_only_parents_reach_their_children() -> None:
    private = {
        role: {rpc.split("/")[1].rpartition(".")[2] for rpc in allowed}
        for role, allowed in POLICY["roles"].items()
    }
    assert {role for role, services in private.items() if "EngineService" in services} == {"worker"}
    learner = {role for role, services in private.items() if "LearnerService" in services}
    assert learner == {"trainer"}
