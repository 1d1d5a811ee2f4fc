"""The top level and the direct dependencies that the project promises."""

import itertools
import re
import tomllib

import pytest

from tests.tidy.sources import ROOT, name_of, own_files

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


@pytest.mark.requirement("API-9")
@pytest.mark.parametrize("name", DEPENDENCIES)
def test_depends_directly_on(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    assert name in {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in wanted}


def test_generators_are_pinned_and_runtimes_reach_them() -> None:
    """Generated code refuses a runtime older than the tool that wrote it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==") for line in project["optional-dependencies"]["dev"] if "==" in line
    )
    assert {"buf-bin", "grpcio-tools", "mypy-protobuf"} <= pins.keys()
    assert f"grpcio>={pins['grpcio-tools']}" in project["dependencies"]
