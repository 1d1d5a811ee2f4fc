"""The configuration: three sources, one schema, every fault named."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from callforest_mesh.chassis.configuration import (
    CONTROL_TOKEN_VARIABLE,
    SERVICES,
    load,
)
from callforest_mesh.chassis.configuration_section import ConfigurationError, read_section


class Colour(Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True, slots=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    count: int = 0
    share: float = 0.5
    flag: bool = False
    path: Path = Path("/x")
    colour: Colour = Colour.RED
    bound: float | None = None
    mode: Literal["a", "b"] = "a"
    words: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must not be negative")


def test_values_become_what_the_fields_say() -> None:
    read = read_section(
        Section,
        {
            "name": "n",
            "count": 3,
            "share": 1,
            "flag": True,
            "path": "relative",
            "colour": "blue",
            "bound": 2,
            "mode": "b",
            "words": ["u", "v"],
            "pair": [1, 2],
            "inner": {"size": 4},
        },
        where="s",
    )
    assert read == Section(
        "n", 3, 1.0, True, Path("relative").absolute(), Colour.BLUE, 2.0, "b", ("u", "v"),
        (1.0, 2.0), Inner(4),
    )  # fmt: skip
    assert isinstance(read.share, float)
    assert (
        read_section(Section, {"name": "n", "bound": None, "colour": "b"}, where="").bound is None
    )


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"name": "n", "cuont": 1}, "s.cuont", "did you mean 'count'?"),
        ({"name": "n", "zzz": 1}, "s.zzz", "known are"),
        ({"name": "n", "inner": {"sise": 1}}, "s.inner.sise", "did you mean 'size'?"),
        ({}, "s.name", "is required"),
        ({"name": 1}, "s.name", "must be text"),
        ({"name": "n", "count": "1"}, "s.count", "must be a whole number"),
        ({"name": "n", "count": True}, "s.count", "must be a whole number"),
        ({"name": "n", "count": 1.5}, "s.count", "must be a whole number"),
        ({"name": "n", "share": True}, "s.share", "must be a number"),
        ({"name": "n", "flag": "yes"}, "s.flag", "must be true or false"),
        ({"name": "n", "path": ""}, "s.path", "must be a path"),
        ({"name": "n", "colour": "green"}, "s.colour", "must be one of red, blue"),
        ({"name": "n", "mode": "c"}, "s.mode", "must be one of 'a', 'b'"),
        ({"name": "n", "words": "u"}, "s.words", "must be a list"),
        ({"name": "n", "words": [1]}, "s.words[0]", "must be text"),
        ({"name": "n", "pair": [1]}, "s.pair", "must have 2 items"),
        ({"name": "n", "inner": 3}, "s.inner", "must be a section"),
        ({"name": "n", "count": -1}, "s", "count must not be negative"),
        ({"name": "n", "bound": "x"}, "s.bound", "must be a number"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], key: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_section(Section, values, where="s")
    assert caught.value.key == key
    assert words in str(caught.value)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tenant: file\nserver: {calls: 1, waits: 2}\ngateway: {port: 3}\n")
    environment = {"CALLFOREST_SERVER__CALLS": "5", "CALLFOREST_TENANT": "variable", "HOME": "/h"}
    read = load(file, environment=environment, settings=["server.calls=7", "worker.vllm.model=m"])
    assert read.tenant == "variable"
    assert (read.server.calls, read.server.waits) == (7, 2)
    assert read.gateway == {"port": 3}
    assert read.worker == {"vllm": {"model": "m"}}


def test_a_variable_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tenant: named\n")
    assert load(environment={"CALLFOREST_CONFIG": str(file)}).tenant == "named"


def test_the_control_token_never_enters_the_configuration() -> None:
    secret = "s3cret-word"
    read = load(environment={CONTROL_TOKEN_VARIABLE: secret})
    assert secret not in repr(read)


@pytest.mark.parametrize(
    ("environment", "settings", "words"),
    [
        ({"CALLFOREST_TENNANT": "x"}, [], "did you mean 'tenant'?"),
        ({}, ["gatway.port=1"], "did you mean 'gateway'?"),
        ({}, ["server.grace=1"], "did you mean 'grace_s'?"),
        ({}, ["server.calls=0"], "calls must be at least 1"),
        ({}, ["server.grace_s=-1"], "grace_s must be 0 to 3600"),
        ({}, ["tenant=a b"], "tenant must be"),
        ({}, ["services=[ledgr]"], "did you mean 'ledger'?"),
        ({}, ["services=[]"], "at least one"),
        ({}, ["services=[ledger, ledger]"], "at most once"),
        ({}, ["addresses.ledger=nowhere"], "host:port or unix:/path"),
        ({}, ["addresses.ledger='127.0.0.1:0'"], "host:port or unix:/path"),
        ({}, ["addresses.ledger='127.0.0.1:65536'"], "host:port or unix:/path"),
        ({}, ["addresses.ledger=unix:/" + "x" * 103], "host:port or unix:/path"),
        ({}, ["addresses.ledger='127.0.0.1:7431'"], "same address"),
        ({}, ["log.level=loud"], "must be one of"),
        ({}, ["nosign"], "key=value"),
        ({}, ["tenant=[x"], "not a YAML value"),
        ({}, ["tenant=a", "tenant.x=1"], "is a value, not a section"),
    ],
)
def test_wrong_configurations_are_refused(
    environment: dict[str, str], settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(environment=environment, settings=settings)
    assert words in str(caught.value)


@pytest.mark.parametrize("content", ["- a list", "a: [", "3", "\xff"])
def test_files_that_hold_no_configuration_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"c\.yaml"):
        load(file, environment={})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "none.yaml", environment={})


def test_every_service_has_an_address_and_a_section() -> None:
    read = load(environment={})
    assert read.services == SERVICES
    for name in SERVICES:
        assert read.addresses.of(name)
        assert read.section(name) == {}
