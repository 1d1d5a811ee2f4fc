"""The one configuration of a mesh: a YAML file, then `CALLFOREST_...` variables, then flags.

    callforest.yaml                 gateway: {port: 8080}
    environment                     CALLFOREST_GATEWAY__PORT=8080
    flag                            --set gateway.port=8080

Later ones win. What is not known is refused, with the nearest key that is. Secrets are read from
the environment alone. The sections of the services stay as they were read: the services' own
options, which the chassis does not know, are their schema.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast

import yaml

from callforest_mesh.chassis import failpoint
from callforest_mesh.chassis.configuration_section import (
    ConfigurationError,
    Value,
    dotted,
    read_section,
    unknown_key,
)
from callforest_mesh.chassis.telemetry import TelemetryOptions
from callforest_mesh.chassis.token_capture import TokenCapture
from callforest_mesh.chassis.training_keys import take_training_keys

SERVICES: Final = ("staging", "ledger", "admission", "worker", "finalizer", "trainer", "gateway")
"""Every service, each behind those that it calls."""
VARIABLE_PREFIX: Final = "CALLFOREST_"
CONFIGURATION_VARIABLE: Final = "CALLFOREST_CONFIG"
"""Names the file when no flag does; not a key itself."""
CONTROL_TOKEN_VARIABLE: Final = "CALLFOREST_CONTROL_TOKEN"  # noqa: S105 - its name
"""Holds the bearer token of the gateway's control route; never in a file, a flag or a log."""
DEFAULT_FILE: Final = "callforest.yaml"
_NOT_KEYS: Final = frozenset(
    {
        CONFIGURATION_VARIABLE,
        CONTROL_TOKEN_VARIABLE,
        failpoint.VARIABLE,
        failpoint.DIARY_VARIABLE,
    }
)
_FILE_BYTES: Final = 1 << 20
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(
    r"unix:(?P<path>.{1,103})|(?P<host>\[[0-9a-fA-F:.]+\]|[^:/]+):(?P<port>\d{1,5})"
)
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where each service listens and its peers reach it: `host:port`, or `unix:/path`.

    Processes of one machine need no more than loopback addresses. A path has at most 103 bytes.
    """

    staging: str = "127.0.0.1:7431"
    ledger: str = "127.0.0.1:7432"
    admission: str = "127.0.0.1:7433"
    worker: str = "127.0.0.1:7434"
    gateway: str = "127.0.0.1:7435"
    finalizer: str = "127.0.0.1:7436"
    trainer: str = "127.0.0.1:7437"

    def __post_init__(self) -> None:
        """Refuse what is no address, and two services at one.

        Raises:
            ValueError: the message names the service.
        """
        seen: dict[str, str] = {}
        for name in SERVICES:
            address = self.of(name)
            found = _ADDRESS.fullmatch(address)
            if found is None or (found["port"] and not 0 < int(found["port"]) <= _PORT_MAX):
                raise ValueError(
                    f"{name} must be host:port or unix:/path of at most 103 bytes, not {address!r}"
                )
            if address in seen:
                raise ValueError(f"{name} and {seen[address]} have the same address {address}")
            seen[address] = name

    def of(self, name: str) -> str:
        """Give the address of a service."""
        return cast("str", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ServerSection:
    """How every service is served.

    Attributes:
        calls: most short calls at once, a service.
        waits: most streams and waits at once, a service.
        grace_s: how long calls under way may take once a service drains.
    """

    calls: int = 1024
    waits: int = 16_384
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse bounds that let nothing pass.

        Raises:
            ValueError: the message names the key.
        """
        for name in ("calls", "waits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.grace_s <= 3600:
            raise ValueError(f"grace_s must be 0 to 3600, not {self.grace_s}")


@dataclass(frozen=True, slots=True)
class LogSection:
    """The log on standard error.

    Attributes:
        format: "text" for people, "json" for collectors.
        level: the least that is written.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class MeshConfiguration:
    """A mesh.

    Attributes:
        tenant: the tenant of the gateway, and of commands that name none.
        state_dir: holds the stores, a directory a service. Not on a network file system.
        services: which services `up` runs.
        addresses: where each listens.
        server: limits and grace.
        log: the log on standard error.
        telemetry: traces and metrics.
        token_capture: what is captured and what of it trains.
        staging: the options of the service, as they were read; so are those below.
    """

    tenant: str = "default"
    state_dir: Path = field(default_factory=lambda: Path(".callforest").absolute())
    services: tuple[str, ...] = SERVICES
    addresses: Addresses = field(default_factory=Addresses)
    server: ServerSection = field(default_factory=ServerSection)
    log: LogSection = field(default_factory=LogSection)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
    token_capture: TokenCapture = field(default_factory=TokenCapture)
    staging: Mapping[str, Value] = field(default_factory=dict)
    ledger: Mapping[str, Value] = field(default_factory=dict)
    admission: Mapping[str, Value] = field(default_factory=dict)
    worker: Mapping[str, Value] = field(default_factory=dict)
    gateway: Mapping[str, Value] = field(default_factory=dict)
    finalizer: Mapping[str, Value] = field(default_factory=dict)
    trainer: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse names that are none.

        Raises:
            ValueError: the message names the key.
        """
        if _TENANT.fullmatch(self.tenant) is None:
            raise ValueError(f"tenant must be 1 to 64 of A-Z a-z 0-9 . _ -, not {self.tenant!r}")
        for name in self.services:
            if name not in SERVICES:
                raise ValueError(str(unknown_key(name, SERVICES, "services")))
        if len(set(self.services)) != len(self.services) or not self.services:
            raise ValueError("services must name each service at most once, and at least one")

    def section(self, name: str) -> Mapping[str, Value]:
        """Give the options of a service as they were read."""
        return cast("Mapping[str, Value]", getattr(self, name))


def load(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> MeshConfiguration:
    """Read the configuration.

    Args:
        file: a YAML file; None takes the one that CALLFOREST_CONFIG names, else callforest.yaml
            of the working directory if it is there, else none.
        environment: the process's variables unless given.
        settings: `key.of.section=value`, values as in YAML.

    Raises:
        ConfigurationError: something is wrong; the message says what.
    """
    variables = os.environ if environment is None else environment
    tree = _read_file(_found_file(file, variables))
    for name, text in sorted(variables.items()):
        if not name.startswith(VARIABLE_PREFIX) or name in _NOT_KEYS:
            continue
        key = name.removeprefix(VARIABLE_PREFIX).lower()
        _put(tree, key.split("__"), _scalar(name, text), name)
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ConfigurationError("", f"--set wants key=value, not {setting!r}")
        _put(tree, key.split("."), _scalar(key, text), key)
    take_training_keys(tree)
    return read_section(MeshConfiguration, tree, where="")


def _found_file(file: Path | None, variables: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if named := variables.get(CONFIGURATION_VARIABLE):
        return Path(named)
    usual = Path(DEFAULT_FILE)
    return usual if usual.is_file() else None


def _read_file(file: Path | None) -> dict[str, Value]:
    if file is None:
        return {}
    try:
        if file.stat().st_size > _FILE_BYTES:
            raise ConfigurationError("", f"{file} is larger than {_FILE_BYTES} bytes")
        tree = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError("", f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError("", f"{file} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigurationError("", f"{file} must hold keys and values")
    return cast("dict[str, Value]", tree)


def _scalar(name: str, text: str) -> Value:
    try:
        return cast("Value", yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigurationError(name, f"is not a YAML value: {error}") from error


def _put(tree: dict[str, Value], path: Sequence[str], value: Value, name: str) -> None:
    """Set a value deep in the tree."""
    node = tree
    for depth, key in enumerate(path[:-1]):
        below = node.setdefault(key, {})
        if not isinstance(below, dict):
            where = dotted("", ".".join(path[: depth + 1]))
            raise ConfigurationError(name, f"{where} is a value, not a section")
        node = below
    node[path[-1]] = value
