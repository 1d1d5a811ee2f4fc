"""Imports run one way, and what must be pure is pure."""

import ast
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import (
    dotted,
    expect_none,
    imports_of,
    name_of,
    package_of,
    python_files,
    tree_of,
)

SERVICES = {"admission", "staging", "ledger", "finalizer", "trainer", "gateway", "worker"}
GENERATED, CORE, CLIENTS, CHASSIS, SERVICE, TOP = range(6)
PACKAGES = {
    "callforest": GENERATED,
    "buf": GENERATED,
    "callforest_core": CORE,
    "callforest_client": CLIENTS,
}
PROJECT = ("core/", "clients/python/", "services/")

# What a pure module may not reach: the network, the disk, the clock, chance, the system.
IMPURE = {
    *("grpc", "lmdb", "asyncio", "aiohttp", "socket", "subprocess", "threading", "multiprocessing"),
    *("time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "tempfile", "shutil"),
    *("logging", "signal", "sched"),
}
# What core/ may import beside itself and the standard library.
CORE_MAY = {"numpy", "google.protobuf", "callforest", "buf", "callforest_core"}
UNNAMED = {"data", "info", "manager", "helper", "helpers", "utils", "util", "common", "misc"}


def layer_of(module: str) -> tuple[int, str] | None:
    """Return the layer of a module and, for a service, its name; None for foreign modules."""
    first, _, rest = module.partition(".")
    if first in PACKAGES:
        return PACKAGES[first], ""
    if first != "callforest_mesh":
        return None
    part = rest.partition(".")[0]
    if part == "chassis":
        return CHASSIS, ""
    return (SERVICE, part) if part in SERVICES else (TOP, "")


def module_of(path: Path) -> str:
    """Return the dotted name of a module."""
    stem = () if path.stem == "__init__" else (path.stem,)
    return ".".join((*package_of(path), *stem))


def runs_against(module: str, target: str) -> bool:
    """Tell whether a module of the project may not import this target."""
    here, there = layer_of(module), layer_of(target)
    assert here, f"{module} belongs to no layer"
    if there is None or target == "callforest_mesh":
        return False
    stranger = here[0] == there[0] == SERVICE and here[1] != there[1]
    return there[0] > here[0] or stranger


def test_imports_run_from_generated_to_services() -> None:
    """generated <- core <- clients <- chassis <- each service; no service imports another."""
    expect_none(
        [
            f"{name_of(path)}:{line} imports {target}"
            for path in python_files(*PROJECT)
            for target, line in imports_of(path)
            if runs_against(module_of(path), target)
        ]
    )


@pytest.mark.parametrize(
    ("module", "target", "wrong"),
    [
        ("callforest_core.custody.digest", "callforest.capture.v1.call_record_pb2", False),
        ("callforest_core.custody.digest", "callforest_client.codec", True),
        ("callforest_client.ledger", "callforest_core.custody", False),
        ("callforest_client.ledger", "callforest_mesh.chassis.server", True),
        ("callforest_mesh.chassis.server", "callforest_mesh.ledger.servicer", True),
        ("callforest_mesh.ledger.servicer", "callforest_mesh.chassis.server", False),
        ("callforest_mesh.ledger.servicer", "callforest_mesh.ledger.core", False),
        ("callforest_mesh.ledger.servicer", "callforest_mesh.staging.core", True),
        ("callforest_mesh.ledger.servicer", "callforest_mesh.cli", True),
        ("callforest_mesh.cli", "callforest_mesh.staging.servicer", False),
        ("callforest_core.custody.digest", "numpy", False),
    ],
)
def test_an_import_that_runs_against_the_order_is_seen(
    module: str, target: str, wrong: bool
) -> None:
    assert runs_against(module, target) == wrong


def _pure_files() -> list[Path]:
    services = [path for path in python_files("services/") if path.name == "core.py"]
    return [*python_files("core/"), *services]


def _reaches(target: str, modules: set[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in modules)


def test_pure_modules_import_nothing_impure() -> None:
    """Time, ids, randomness and storage come in as arguments."""
    expect_none(
        [
            f"{name_of(path)}:{line} imports {target}"
            for path in _pure_files()
            for target, line in imports_of(path)
            if _reaches(target, IMPURE)
        ]
    )


def test_pure_modules_take_no_chance_and_open_nothing() -> None:
    banned = {"open", "print", "input", "np.random", "numpy.random"}
    expect_none(
        [
            f"{name_of(path)}:{node.lineno} uses {dotted(node)}"
            for path in _pure_files()
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Name | ast.Attribute) and dotted(node) in banned
        ]
    )


def test_core_needs_only_numpy_and_messages() -> None:
    expect_none(
        [
            f"{name_of(path)}:{line} imports {target}"
            for path in python_files("core/")
            for target, line in imports_of(path)
            if target.partition(".")[0] not in sys.stdlib_module_names
            and not _reaches(target, CORE_MAY)
        ]
    )


def test_one_file_imports_lmdb() -> None:
    users = {
        name_of(path)
        for path in python_files(*PROJECT)
        for target, _ in imports_of(path)
        if _reaches(target, {"lmdb"})
    }
    assert users == {"services/callforest_mesh/chassis/lmdb_environment.py"}


def test_modules_are_named_by_a_noun_that_says_something() -> None:
    unnamed = [
        name_of(path)
        for path in python_files()
        if UNNAMED & {*path.stem.split("_"), *package_of(path)[-1:]}
    ]
    expect_none(unnamed)
