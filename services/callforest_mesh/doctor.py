"""`callforest doctor`: is everything here that a mesh needs, and if not, what to do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.directory import sync_directory

_DISTRIBUTIONS: Final = ("grpcio", "protobuf", "protovalidate", "lmdb", "aiohttp", "numpy")
_LOCAL_ONLY: Final = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "afs"}
_SPACE_LEAST: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        subject: what was looked at.
        text: what was found and, if it is not ok, what to do.
        ok: whether the mesh can run with it.
    """

    subject: str
    text: str
    ok: bool


def examine(configuration: MeshConfiguration) -> Iterator[Finding]:
    """Check the installation against a configuration, one finding after the other."""
    yield from _versions()
    yield _options(configuration)
    yield _state_directory(configuration.state_dir)
    yield from _file_system(configuration.state_dir)
    yield from _addresses(configuration)
    if "worker" in configuration.services:
        yield _engine(configuration)
    if "trainer" in configuration.services:
        yield _importable("trainer", ("torch", "megatron.core"), "install callforest[trainer]")


def _versions() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    text = version if ok else f"{version}: 3.11 or later is needed"
    yield Finding("python", text, ok=ok)
    for name in _DISTRIBUTIONS:
        try:
            yield _good(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield _bad(name, "is missing: install callforest[mesh]")


def _options(configuration: MeshConfiguration) -> Finding:
    from callforest_mesh.mesh_options import check_all

    try:
        check_all(configuration)
    except ConfigurationError as error:
        return _bad("configuration", str(error))
    return _good("configuration", f"services {', '.join(configuration.services)}")


def _state_directory(path: Path) -> Finding:
    """Write and sync a file where the stores will be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-") as file:
            file.write(b"callforest")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)
    except OSError as error:
        return _bad("state_dir", f"{path}: {error.strerror}; set state_dir to a writable directory")
    return _good("state_dir", f"{path} is writable, and fsync works")


def _file_system(path: Path) -> Iterator[Finding]:
    try:
        space = os.statvfs(path)
    except OSError:
        return  # said already
    kind = _kind_of(path)
    if kind in _LOCAL_ONLY:
        text = f"{path} is on {kind}: the stores need a local file system; move state_dir"
        yield _bad("file system", text)
    elif kind in ("tmpfs", "ramfs"):
        text = f"{path} is on {kind}: nothing there survives a restart; move state_dir"
        yield _bad("file system", text)
    else:
        yield _good("file system", kind or "unknown")
    free = space.f_bavail * space.f_frsize
    enough = free >= _SPACE_LEAST
    text = f"{free >> 20} MiB are free{'' if enough else ': at least 1 GiB is needed'}"
    yield Finding("space", text, ok=enough)


def _kind_of(path: Path) -> str:
    """Name the file system of a path, "" when it cannot be told."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    resolved = f"{path.resolve()}/"
    for line in mounts:
        _, point, found, *_ = line.split(" ")
        if resolved.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, found
    return kind


def _addresses(configuration: MeshConfiguration) -> Iterator[Finding]:
    for name in configuration.services:
        address = configuration.addresses.of(name)
        yield _free(f"address of {name}", address)


def _free(subject: str, address: str) -> Finding:
    """Try to listen at an address, and leave it at once."""
    taken = f"{address} is taken: stop what listens there, or set another in addresses"
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.parent.is_dir():
            return _bad(subject, f"{path.parent} is not there: make the directory")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return _bad(subject, taken)
        return _good(subject, f"{address} is free")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        return _bad(subject, f"{taken} ({error.strerror})")
    return _good(subject, f"{address} is free")


def _engine(configuration: MeshConfiguration) -> Finding:
    if configuration.worker.get("engine", "vllm") == "scripted":
        return _good("engine", "scripted: answers are made up, for tests and demos")
    return _importable("engine", ("vllm",), "install callforest[gpu], or `make install` on a CPU")


def _importable(subject: str, modules: tuple[str, ...], remedy: str) -> Finding:
    """Say whether modules can be found; they are not run, which takes long."""
    find: Callable[[str], object] = importlib.util.find_spec
    for name in modules:
        try:
            found = find(name) is not None
        except ImportError:
            found = False
        if not found:
            return _bad(subject, f"{name} cannot be imported: {remedy}")
    return _good(subject, f"{', '.join(modules)} can be imported")


def _good(subject: str, text: str) -> Finding:
    return Finding(subject, text, ok=True)


def _bad(subject: str, text: str) -> Finding:
    return Finding(subject, text, ok=False)
