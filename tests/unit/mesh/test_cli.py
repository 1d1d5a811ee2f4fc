"""The command line: what it refuses, with which status, and how light it starts."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

from callforest_mesh.assembly import Clients, build
from callforest_mesh.chassis.configuration import CONTROL_TOKEN_VARIABLE, load
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.cli import main
from callforest_mesh.mesh_options import (
    check_all,
    gateway_options,
    trainer_options,
    worker_options,
)
from callforest_mesh.terminal import AWAY, DONE, NO, WRONG
from callforest_mesh.trainer.service import TrainerService

SCRIPTED = ["--set", "worker.engine=scripted", "--set", "trainer.model_path=m"]


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command sets up the log of its process, which here is the tests'."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where no callforest.yaml is, without variables of the caller."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CALLFOREST_")]:
        monkeypatch.delenv(name)


def words(settings: list[str]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["serve", "ledgr"], WRONG, "no service 'ledgr'"),
        (["up", *words(["tennant=x"])], WRONG, "did you mean 'tenant'?"),
        (["up", *words(["worker.vlm=x"])], WRONG, "worker.vlm: is not a known key; did you mean"),
        (["up"], WRONG, "worker.vllm.model: is required"),
        (["up", *words(["worker.engine=x"])], WRONG, "must be one of 'vllm', 'scripted'"),
        (["up", *words(["staging.quota_bytes=x"]), *SCRIPTED], WRONG, "staging.quota_bytes"),
        (
            ["up", "--processes", *words(["worker.scripted.model=3"]), *SCRIPTED],
            WRONG,
            "worker.scripted.model: must be text",
        ),
        (["up", "--config", "none.yaml"], WRONG, "none.yaml cannot be read"),
        (["up", *words(["gateway.control_token=x"]), *SCRIPTED], WRONG, CONTROL_TOKEN_VARIABLE),
        (
            [
                *("up", "--processes", *words(["token_capture.forest_training=true"])),
                *words(["token_capture.selection_policy=no_such.training:choose"]),
                *SCRIPTED,
            ],
            WRONG,
            "selection_policy 'no_such.training:choose': no_such.training cannot be imported",
        ),
        (
            ["serve", "finalizer", *words(["finalizer.selection_policy=all_captured"])],
            WRONG,
            "finalizer.selection_policy: is token_capture.selection_policy",
        ),
        (
            ["up", *words(["finalizer.min_valid_fraction_per_group=0.5"]), *SCRIPTED],
            WRONG,
            "finalizer.min_valid_fraction_per_group: is token_capture.min_valid_fraction_per_group",
        ),
        (["show", "r", *words(["addresses.ledger=unix:/none/l"])], AWAY, "is the mesh up?"),
        (["verify", "r", *words(["addresses.ledger=unix:/none/l"])], AWAY, "is the mesh up?"),
        (
            ["serve", "ledger", *words(["ledger.store=memory", "addresses.ledger=unix:l"])],
            NO,
            "use the lmdb store",
        ),
        (["verify", "--store", "none"], NO, "none holds no store"),
        (["compact", "ledger"], NO, "run it where the ledger store is"),
        (["backup", "staging", "copies"], NO, "run it where the staging store is"),
        (["gc"], NO, "run gc where all three stores are"),
        (["conformance", "check", "nothing", "x"], WRONG, "nothing"),
        (["conformance", "check", "lineage", "none.jsonl"], WRONG, "none.jsonl"),
        (["conformance", "eval", "lineage", "none.jsonl"], WRONG, "none.jsonl"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize("mode", [[], ["--processes"]])
def test_what_a_start_would_fail_without_is_said_before_it(
    mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "none"
    wrong = words(["services=[worker]", f"worker.vllm.model={model}", "worker.vllm.device=cpu"])
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/w")
        other.listen()
        arguments = ["up", *mode, *wrong, *words([f"addresses.worker=unix:{tmp_path}/w"])]
        assert main(arguments) == NO
    said = capsys.readouterr().err
    assert f"address of worker: unix:{tmp_path}/w is taken: stop what listens there" in said
    assert f"model of worker: {model} is no directory: put a checkpoint there" in said


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["nothing"], ["serve"], ["conformance"]),
        *(["verify"], ["verify", "key", "--store"], ["compact"], ["compact", "gateway"]),
        *(["backup", "staging"], ["gc", "--late-age", "-1"], ["gc", "--retention", "long"]),
    ],
)
def test_half_a_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == WRONG


def test_conformance_starts_light() -> None:
    heavy = ["grpc", "lmdb", "aiohttp", "torch", "vllm", "yaml"]
    program = (
        "import sys, json\n"
        "from callforest_mesh.cli import main\n"
        "main(['conformance', 'check', 'lineage', sys.argv[1]])\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    root = Path(__file__).parents[3]
    cases = root / "tests/golden/data/cases/lineage.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", program, str(cases)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & set(heavy)
    assert done.stdout.splitlines()[-2].endswith("0 failed")


def test_doctor_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    status = main(["doctor", *words([f"state_dir={tmp_path}/file/state"])])
    out = capsys.readouterr().out
    assert status == NO
    assert "NO  state_dir" in out
    assert "set state_dir to a writable directory" in out
    assert "NO  configuration" in out
    assert "worker.vllm.model: is required" in out


def test_doctor_is_content_with_a_good_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("staging", "ledger")
    settings = [
        f"state_dir={tmp_path}/state",
        f"services=[{', '.join(names)}]",
        *(f"addresses.{name}=unix:{tmp_path}/{name}.sock" for name in names),
    ]
    status = main(["doctor", *words(settings)])
    out = capsys.readouterr().out
    assert status == DONE, out
    assert "fsync works" in out
    assert [path.name for path in (tmp_path / "state").iterdir()] == [], "it leaves nothing behind"


def test_the_control_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_TOKEN_VARIABLE, "s3cret-word")
    options = gateway_options(load(settings=["tenant=t", "gateway.port=1"]))
    assert options.control_token == "s3cret-word"
    assert (options.tenant, options.port) == ("t", 1)
    assert "s3cret-word" not in repr(options)


def test_stores_lie_in_the_state_directory(tmp_path: Path) -> None:
    read = load(settings=[f"state_dir={tmp_path}", "worker.vllm.model=m"])
    assert worker_options(read).state_path == tmp_path / "worker"
    trainer = trainer_options(read)
    assert trainer.path == tmp_path / "trainer"
    assert trainer.model_path == Path("m").absolute(), "the engine's model unless another is named"
    check_all(read)


def test_options_of_services_that_do_not_run_are_not_asked_for() -> None:
    check_all(load(settings=["services=[ledger]"]))
    with pytest.raises(ConfigurationError, match=r"trainer\.model_path: is required"):
        check_all(load(settings=["services=[trainer]"]))


@pytest.mark.requirement("CFG-1")
async def test_the_trainer_s_bound_of_a_group_is_its_client_s(tmp_path: Path) -> None:
    settings = [f"state_dir={tmp_path}", "trainer.model_path=m", "services=[trainer]"]
    limit = 128 << 20
    read = load(settings=[*settings, f"trainer.group_bytes_max={limit}"])
    assert trainer_options(read).group_bytes_max == limit
    async with AsyncExitStack() as closers:
        clients = Clients(read, lambda _name: grpc.aio.insecure_channel("unix:/none"), closers)
        service = build("trainer", read, Drain(), clients)
        assert isinstance(service, TrainerService)
        rows = service._training._finalizer.subscribe("trainer")
        assert rows._assembler._bytes_max == limit
        await rows.close()
    with pytest.raises(ConfigurationError, match="group_bytes_max must be at least 67108864"):
        trainer_options(load(settings=[*settings, "trainer.group_bytes_max=1"]))


@pytest.mark.requirement("TRN-7", "CFG-1")
def test_the_trainers_checkpoints_know_how_the_mesh_captures_and_pads() -> None:
    model = "trainer.model_path=m"
    plain = trainer_options(load(settings=[model])).learner()
    assert (plain.forest, plain.row_multiple) == (False, 4)
    settings = ["token_capture.forest_training=true", "trainer.batch.train_microbatch_size=3"]
    forest = trainer_options(load(settings=[model, *settings])).learner()
    assert (forest.forest, forest.row_multiple) == (True, 3)
    for key in ("forest=true", "row_multiple=4"):
        with pytest.raises(ConfigurationError, match="which every service follows"):
            trainer_options(load(settings=[model, f"trainer.{key}"]))


@pytest.mark.requirement("CFG-1")
def test_a_trainer_of_one_rank_is_not_configured_for_more() -> None:
    """Else it would pad for ranks that it lacks, and be refused at its first step."""
    ranks = ["trainer.batch.rank_count=2", "trainer.model_path=m"]
    with pytest.raises(ConfigurationError, match=r"rank_count is 2, .* has one rank"):
        check_all(load(settings=["services=[trainer]", *ranks]))
    check_all(load(settings=["services=[finalizer]", *ranks]))


def test_the_example_is_a_whole_configuration() -> None:
    example = Path(__file__).parents[3] / "deploy" / "callforest.yaml"
    read = load(example)
    check_all(read)
    defaults = load(settings=["worker.vllm.model=models/policy"])
    assert (read.addresses, read.server, read.log) == (
        defaults.addresses,
        defaults.server,
        defaults.log,
    )
    assert gateway_options(read) == gateway_options(defaults)
