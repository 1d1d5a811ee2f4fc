"""Each finding of `callforest doctor`: what is well, what is not, and what to do then."""

import errno
import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest

from callforest_mesh import doctor, generated_code, storage_check
from callforest_mesh.address_check import examine_address
from callforest_mesh.chassis.configuration import load
from callforest_mesh.cli import main
from callforest_mesh.finding import Finding
from callforest_mesh.terminal import DONE, NO


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where no callforest.yaml is, without variables of the caller."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CALLFOREST_")]:
        monkeypatch.delenv(name)


def examined(tmp_path: Path, *settings: str, services: str = "staging") -> dict[str, Finding]:
    read = load(
        environment={},
        settings=[
            f"state_dir={tmp_path}/state",
            f"services=[{services}]",
            f"addresses.staging=unix:{tmp_path}/s",
            f"addresses.worker=unix:{tmp_path}/w",
            f"addresses.trainer=unix:{tmp_path}/t",
            *settings,
        ],
    )
    return {finding.subject: finding for finding in doctor.examine(read)}


def test_a_whole_installation_has_no_fault(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert [finding for finding in found.values() if not finding.ok] == []
    assert {"state_dir", "file system", "space", "sync", "clock", "node", "open files"} <= set(
        found
    )


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DISTRIBUTIONS", ("grpcio", "no-such-distribution"))
    missing = examined(tmp_path)["no-such-distribution"]
    assert not missing.ok
    assert "install callforest[mesh]" in missing.text


@pytest.mark.parametrize(
    ("limit", "ok"), [(1024, False), (4096, True), (resource.RLIM_INFINITY, True)]
)
def test_open_files(limit: int, ok: bool) -> None:
    finding = doctor._open_files(limit)
    assert finding.ok == ok
    assert ok or "ulimit -n" in finding.text


def test_node_may_be_absent() -> None:
    assert doctor._node(None).ok
    assert "fine" in doctor._node(None).text
    assert doctor._node("/usr/bin/node").ok


def test_a_wrong_configuration_is_said(tmp_path: Path) -> None:
    finding = examined(tmp_path, "staging.quota_bytes=x")["configuration"]
    assert not finding.ok
    assert "staging" in finding.text


def test_generated_code_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generated_code.examine().ok
    (tmp_path / "newer_pb2.py").write_text(
        "from google.protobuf import runtime_version as r\n"
        "r.ValidateProtobufRuntimeVersion(r.Domain.PUBLIC, 99, 0, 0, '', 'newer.proto')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (("newer_pb2", "99.0.0"), ("nowhere_pb2", "cannot be imported")):
        finding = generated_code.examine([name])
        assert not finding.ok
        assert said in finding.text
        assert "install callforest[mesh] again" in finding.text
    monkeypatch.setattr(generated_code, "_modules", lambda: ["newer_pb2"])
    assert main(["doctor"]) == NO
    assert capsys.readouterr().out.startswith("NO  generated code")


@pytest.mark.parametrize(
    ("kind", "ok", "said"),
    [
        ("ext4", True, "ext4"),
        ("", True, "unknown"),
        ("nfs4", False, "need a local file system"),
        ("fuse.sshfs", False, "need a local file system"),
        ("tmpfs", False, "nothing there survives"),
        ("overlay", True, "mount a volume"),
    ],
)
def test_file_systems(kind: str, ok: bool, said: str) -> None:
    finding = storage_check.file_system(Path("/state"), kind)
    assert finding.ok == ok
    assert said in finding.text


def test_the_file_system_is_the_nearest_mount(tmp_path: Path) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    escaped = f"{tmp_path}/a\\040b"
    mounts.write_text(
        f"d / ext4 rw 0 0\nd {tmp_path} xfs rw 0 0\nd {escaped} nfs4 rw 0 0\nd {tmp_path}/a tmpfs\n"
    )
    assert storage_check.kind_of(tmp_path / "a b" / "c", mounts) == "nfs4"
    assert storage_check.kind_of(tmp_path, mounts) == "xfs"
    assert storage_check.kind_of(Path("/"), mounts) == "ext4"
    assert storage_check.kind_of(tmp_path, tmp_path / "none") == ""


def test_space() -> None:
    assert storage_check.space_left(1 << 30).ok
    finding = storage_check.space_left((1 << 30) - 1)
    assert not finding.ok
    assert "free some" in finding.text


def test_a_slow_disk_is_said() -> None:
    assert storage_check.sync_time([0.001] * 19 + [2.0]).ok, "one stall is no slow disk"
    finding = storage_check.sync_time([0.2] * 20)
    assert not finding.ok
    assert "200.0 ms" in finding.text
    assert "faster disk" in finding.text


def test_clocks() -> None:
    assert storage_check.clock(0.5).ok
    assert "dated -3600 s off" in storage_check.clock(-3600.0).text
    past = storage_check.clock(0.0, now=lambda: 0.0)
    assert not past.ok
    assert "NTP" in past.text
    assert storage_check.clock(0.0, now=time.time).ok


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    (finding,) = storage_check.examine(tmp_path)
    assert not finding.ok
    assert "Read-only file system; set state_dir" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_addresses_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        finding = examined(tmp_path, f"addresses.staging={address}")["address of staging"]
        assert not finding.ok
        assert f"{address} is taken" in finding.text
        port = taken.getsockname()[1]
        found = examined(
            *(tmp_path, f"gateway.port={port}", f"addresses.gateway=unix:{tmp_path}/g"),
            services="gateway",
        )
        assert found["address of gateway"].ok
        assert not found["HTTP of gateway"].ok
        assert "gateway.port" in found["HTTP of gateway"].text
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        assert "is taken" in examined(tmp_path)["address of staging"].text
    assert examined(tmp_path)["address of staging"].ok, "what was left behind is no listener"
    nowhere = examined(tmp_path, f"addresses.staging=unix:{tmp_path}/none/s")["address of staging"]
    assert "make the directory" in nowhere.text
    absent = examined(tmp_path, "addresses.staging=no-such-host.invalid:1")["address of staging"]
    assert "has no address here" in absent.text


def test_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = examined(tmp_path, "worker.engine=scripted", services="worker")
    assert scripted["engine"].ok
    assert not {"GPU", "model of worker"} & set(scripted)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(doctor, "_GPU", tmp_path / "none")
    found = examined(tmp_path, "worker.vllm.model=none", services="worker")
    assert re.search(r"vllm cannot be imported: install callforest\[gpu\]", found["engine"].text)
    assert "set worker.vllm.device=cpu" in found["GPU"].text
    assert "put a checkpoint there, or set worker.vllm.model" in found["model of worker"].text
    cpu = examined(tmp_path, "worker.vllm.model=none", "worker.vllm.device=cpu", services="worker")
    assert "GPU" not in cpu


def test_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _name: None)
    found = examined(tmp_path, f"trainer.model_path={tmp_path}/none", services="trainer")
    assert "install callforest[trainer]" in found["trainer"].text
    assert "set trainer.model_path" in found["model of trainer"].text
    unset = examined(tmp_path, services="trainer")
    assert "model of trainer" not in unset, "the configuration's finding says it"
    assert not unset["configuration"].ok


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged() -> Finding:
        return doctor._checkpoint("model", tmp_path, "key")

    assert "config.json is not there" in judged().text
    (tmp_path / "config.json").write_text("{}")
    assert "model.safetensors is not there: key must name" in judged().text
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert judged() == Finding("model", f"{tmp_path}, 1 files of weights", ok=True)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "let this user read it" in judged().text


def test_all_findings_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", f"state_dir={tmp_path}/state", "--set", "services=[staging]"]
    words += ["--set", f"addresses.staging=unix:{tmp_path}/s"]
    assert main(["doctor", *words]) == DONE
    healthy = capsys.readouterr().out.splitlines()
    assert main(["doctor", *words, "--set", "staging.quota_bytes=x"]) == NO
    ill = capsys.readouterr().out.splitlines()
    assert len(ill) == len(healthy)
    assert [line.split("  ")[0] for line in ill if line.startswith("NO")] == ["NO"]


@pytest.mark.parametrize("address", ["a..de:7000", f"{'a' * 64}.de:7000", "unix:/" + "é" * 100])
def test_an_address_that_can_be_none_is_a_finding(address: str) -> None:
    found = examine_address("address of staging", address, "addresses")
    assert not found.ok
    assert found.text.endswith(": set another in addresses")
