"""`callforest doctor`: is everything here that a mesh needs, and if not, what to do."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from callforest_mesh import storage_check
from callforest_mesh.address_check import examine_address
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.finding import Finding, bad, good

_DISTRIBUTIONS: Final = ("grpcio", "protobuf", "protovalidate", "lmdb", "aiohttp", "numpy")
_FILES_LEAST: Final = 4096
_GPU: Final = Path("/dev/nvidiactl")


def examine(configuration: MeshConfiguration) -> Iterator[Finding]:
    """Check the installation against a configuration, one finding after the other."""
    yield from _versions()
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _node(shutil.which("node"))
    yield _options(configuration)
    yield from storage_check.examine(configuration.state_dir)
    yield from needs(configuration)


def needs(configuration: MeshConfiguration) -> Iterator[Finding]:
    """Check what a start fails without, one finding after the other: addresses, engine, models."""
    yield from _addresses(configuration)
    if "worker" in configuration.services:
        yield from _engine(configuration)
    if "trainer" in configuration.services:
        yield from _trainer(configuration)


def _versions() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    text = version if ok else f"{version}: 3.11 or later is needed"
    yield Finding("python", text, ok=ok)
    for name in _DISTRIBUTIONS:
        try:
            yield good(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield bad(name, "is missing: install callforest[mesh]")


def _open_files(limit: int) -> Finding:
    """Each connection of a harness is an open file."""
    if limit != resource.RLIM_INFINITY and limit < _FILES_LEAST:
        return bad("open files", f"at most {limit}: raise it to {_FILES_LEAST} with `ulimit -n`")
    return good("open files", "any number" if limit == resource.RLIM_INFINITY else f"{limit}")


def _node(found: str | None) -> Finding:
    if found is None:
        return good("node", "absent, which is fine: only the TypeScript client is made with it")
    return good("node", f"{found}; only the TypeScript client is made with it")


def _options(configuration: MeshConfiguration) -> Finding:
    from callforest_mesh.mesh_options import check_all

    try:
        check_all(configuration)
    except ConfigurationError as error:
        return bad("configuration", str(error))
    return good("configuration", f"services {', '.join(configuration.services)}")


def _addresses(configuration: MeshConfiguration) -> Iterator[Finding]:
    for name in configuration.services:
        address = configuration.addresses.of(name)
        yield examine_address(f"address of {name}", address, "addresses")
    if "gateway" in configuration.services:
        from callforest_mesh.mesh_options import gateway_options

        try:
            options = gateway_options(configuration)
        except ConfigurationError:
            return  # said already
        yield examine_address("HTTP of gateway", f"{options.host}:{options.port}", "gateway.port")


def _engine(configuration: MeshConfiguration) -> Iterator[Finding]:
    if configuration.worker.get("engine", "vllm") == "scripted":
        yield good("engine", "scripted: answers are made up, for tests and demos")
        return
    yield _importable("engine", ("vllm",), "install callforest[gpu], or `make install` on a CPU")
    vllm = configuration.worker.get("vllm")
    options = vllm if isinstance(vllm, dict) else {}
    if options.get("device", "gpu") == "gpu":
        yield _gpu(_GPU)
    if isinstance(model := options.get("model"), str):
        yield _checkpoint("model of worker", Path(model), "worker.vllm.model")


def _trainer(configuration: MeshConfiguration) -> Iterator[Finding]:
    from callforest_mesh.mesh_options import trainer_options

    modules = ("torch", "megatron.core", "safetensors", "transformers")
    yield _importable("trainer", modules, "install callforest[trainer]")
    try:
        path = trainer_options(configuration).model_path
    except ConfigurationError:
        return  # said already
    yield _checkpoint("model of trainer", path, "trainer.model_path")


def _gpu(device: Path) -> Finding:
    if not device.exists():
        text = "none is visible: give one to this machine, or set worker.vllm.device=cpu"
        return bad("GPU", text)
    return good("GPU", "the driver is there")


def _checkpoint(subject: str, path: Path, key: str) -> Finding:
    """Look for what every Hugging Face checkpoint has: a configuration, and weights."""
    if not path.is_dir():
        return bad(subject, f"{path} is no directory: put a checkpoint there, or set {key}")
    weights = sorted(path.glob("*.safetensors"))
    for file in (path / "config.json", *(weights or [path / "model.safetensors"])):
        if not file.is_file():
            return bad(subject, f"{file} is not there: {key} must name a Hugging Face checkpoint")
        if not os.access(file, os.R_OK):
            return bad(subject, f"{file} cannot be read: let this user read it")
    return good(subject, f"{path}, {len(weights)} files of weights")


def _importable(subject: str, modules: tuple[str, ...], remedy: str) -> Finding:
    """Say whether modules can be found; they are not run, which takes long."""
    find: Callable[[str], object] = importlib.util.find_spec
    for name in modules:
        try:
            found = find(name) is not None
        except ImportError:
            found = False
        if not found:
            return bad(subject, f"{name} cannot be imported: {remedy}")
    return good(subject, f"{', '.join(modules)} can be imported")
