"""What stands in deploy/ starts what it says, with a configuration that is accepted."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration, load
from callforest_mesh.cli import _parser
from callforest_mesh.mesh_options import check_all
from callforest_mesh.worker.vllm.options import VllmOptions

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CONTAINERS = COMPOSE["services"]
HOSTED = {"worker-gpu": "worker"}
STATE = "/var/lib/callforest"
COMPILED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
CACHES = {"worker": ("VLLM_CACHE_ROOT", *COMPILED), "trainer": COMPILED}


def filled(text: object) -> str:
    """Put the defaults in the place of the host's variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


def configured(name: str) -> MeshConfiguration:
    """Read the configuration as a container does: the image's file, its variables, its flags."""
    container = CONTAINERS[name]
    environment = {key: filled(value) for key, value in container["environment"].items()}
    parsed = _parser().parse_args(container["command"])
    return load(
        DEPLOY / "callforest.yaml",
        environment={**environment, "CALLFOREST_STATE_DIR": STATE},
        settings=[*parsed.settings, f"services=[{parsed.name}]"],
    )


def test_every_service_has_a_container() -> None:
    assert {HOSTED.get(name, name) for name in CONTAINERS} == set(SERVICES)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_runs_its_service(name: str) -> None:
    container, service = CONTAINERS[name], HOSTED.get(name, name)
    parsed = _parser().parse_args(container["command"])
    assert (parsed.name, container["command"][0]) == (service, "serve")
    read = configured(name)
    check_all(read)
    host, _, _ = read.addresses.of(service).rpartition(":")
    aliases = container["networks"]["mesh"]["aliases"] if name in HOSTED else [name]
    assert host in aliases, "others reach it by its name"
    probe = container["healthcheck"]["test"]
    assert probe[:2] == ["CMD", "callforest"]
    asked = _parser().parse_args(probe[2:])
    assert (probe[2], asked.name) == ("health", service)
    grace_s = int(container["stop_grace_period"].removesuffix("s"))
    assert grace_s > read.server.grace_s


@pytest.mark.parametrize("name", [*CONTAINERS])
def test_what_a_container_keeps_is_on_a_volume(name: str) -> None:
    container, service = CONTAINERS[name], HOSTED.get(name, name)
    mounts = [filled(one).split(":") for one in container.get("volumes", [])]
    stateful = service in ("staging", "ledger", "worker", "finalizer", "trainer")
    assert stateful == any(mount[1:] == [f"{STATE}/{service}"] for mount in mounts)
    for source, *_ in mounts:
        assert source in COMPOSE["volumes"] or source.startswith(("./", "/"))


@pytest.mark.parametrize("name", [name for name, one in CONTAINERS.items() if "deploy" in one])
def test_kernels_are_compiled_where_a_container_may_write_and_run(name: str) -> None:
    """All but volumes and /tmp is read-only, and a tmpfs runs nothing unless it is told to."""
    container, service = CONTAINERS[name], HOSTED.get(name, name)
    assert container["image"] == "callforest-gpu"
    assert container["build"]["args"]["EXTRAS"] == "mesh,gpu,trainer"
    assert container["read_only"]
    volume = f"{STATE}/{service}"
    assert volume in [filled(one).partition(":")[2] for one in container["volumes"]]
    assert container["tmpfs"] == ["/tmp:exec"]
    assert container["environment"]["HOME"] == volume
    for cache in CACHES[service]:
        assert container["environment"][cache].startswith(f"{volume}/cache/")


def test_the_unit_compiles_kernels_in_its_state_directory() -> None:
    unit = (DEPLOY / "systemd" / "callforest@.service").read_text()
    lines = re.findall(r"^Environment=(.+)$", unit, re.MULTILINE)
    variables = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    assert variables["CALLFOREST_STATE_DIR"] == STATE
    assert "StateDirectory=callforest callforest/%i\n" in unit
    assert variables["HOME"] == f"{STATE}/%i"
    for cache in {*CACHES["worker"], *CACHES["trainer"]}:
        assert variables[cache].startswith(f"{STATE}/%i/cache/")


def test_the_engine_keeps_the_caches_that_it_is_given() -> None:
    own = VllmOptions(model="m", device="gpu").environment(Path("/tmp/engine"))
    assert not own.keys() & {"HOME", *CACHES["worker"]}


def test_containers_wait_for_containers_that_are_there_with_them() -> None:
    for container in CONTAINERS.values():
        for other, condition in container.get("depends_on", {}).items():
            assert "profiles" not in CONTAINERS[other], "it may not be in the profile"
            assert condition == {"condition": "service_healthy"}


def test_only_the_gateway_is_reached_from_outside() -> None:
    assert [name for name, one in CONTAINERS.items() if "ports" in one] == ["gateway"]
    published = filled(CONTAINERS["gateway"]["ports"][0])
    assert published.partition(":")[2] == "7430"


def test_each_profile_is_a_whole_mesh() -> None:
    for profile, trained in (("scripted", False), ("gpu", True)):
        chosen = {
            HOSTED.get(name, name)
            for name, one in CONTAINERS.items()
            if profile in one.get("profiles", [profile])
        }
        assert chosen == {*SERVICES} - (set() if trained else {"trainer"})


def test_the_image_has_what_containers_run() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["callforest"]' in lines
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", lines, re.MULTILINE):
        for source in copied.split():
            assert (DEPLOY.parent / source).exists(), source


def test_the_units_start_every_service() -> None:
    unit = (DEPLOY / "systemd" / "callforest@.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    target = (DEPLOY / "systemd" / "callforest.target").read_text()
    started = re.findall(r"callforest@(\w+)\.service", target)
    assert started == list(dict.fromkeys(started))
    assert set(started) == set(SERVICES)
    for name in started:
        words = shlex.split(start.replace("%i", name))
        parsed = _parser().parse_args(words[1:])
        assert (parsed.name, str(parsed.config)) == (name, "/etc/callforest/callforest.yaml")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_units_are_understood(tmp_path: Path) -> None:
    """systemd itself reads them; the program is this installation's."""
    for unit in (DEPLOY / "systemd").iterdir():
        program = Path(sys.executable).with_name("callforest")
        text = unit.read_text().replace("/usr/local/callforest/bin/callforest", str(program))
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(map(str, tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "callforest" in line]
    assert complaints == []
