"""Weight updates: checked, in order, remembered over a restart."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.worker.engine import EngineRefusalError, EngineUnavailableError
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from callforest_mesh.worker.weight_record import (
    WeightRecord,
    read_weight_record,
    write_weight_record,
)
from callforest_mesh.worker.weights import Weights


class WatchedEngine(ScriptedEngine):
    """Says what it was asked to load, and can refuse."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(ScriptedOptions(weight_version=version))
        self.loaded: list[tuple[str, int]] = []
        self.fault: Exception | None = None
        self.loading: asyncio.Event | None = None

    async def update_weights(self, path: str, version: int) -> None:
        if self.loading is not None:
            await self.loading.wait()
        if self.fault is not None:
            raise self.fault
        await super().update_weights(path, version)
        self.loaded.append((path, version))


def weights_file(directory: Path, content: bytes = b"weights", version: int = 1) -> WeightRecord:
    file = directory / f"v{version}.safetensors"
    file.write_bytes(content)
    return WeightRecord(str(file), version, hashlib.sha256(content).digest())


async def started(directory: Path, version: int = 0) -> tuple[WatchedEngine, Weights]:
    engine = WatchedEngine(version)
    await engine.start()
    return engine, Weights(engine, directory / "state", "engine")


def loaded_by(engine: WatchedEngine, record: WeightRecord) -> WeightRecord:
    return replace(record, configuration_digest=engine.describe().configuration_digest)


async def refusal_of(weights: Weights, record: WeightRecord) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await weights.update(record)
    return caught.value


@pytest.mark.requirement("CAP-8")
async def test_update_is_loaded_stamped_and_remembered(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path)
    record = weights_file(tmp_path)
    assert await weights.update(record) == 1
    assert engine.describe().weight_version == 1
    assert read_weight_record(tmp_path / "state") == loaded_by(engine, record)


async def test_repeat_is_a_no_op(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path)
    record = weights_file(tmp_path)
    await weights.update(record)
    assert await weights.update(record) == 1
    assert len(engine.loaded) == 1


async def test_same_version_with_another_digest_is_stale(tmp_path: Path) -> None:
    _, weights = await started(tmp_path)
    await weights.update(weights_file(tmp_path))
    refusal = await refusal_of(weights, weights_file(tmp_path, b"other", 1))
    assert refusal.reason == er.ERROR_REASON_WEIGHT_VERSION_STALE
    assert refusal.facts == {"version": "1", "current_version": "1"}


async def test_older_version_is_stale(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path, version=7)
    refusal = await refusal_of(weights, weights_file(tmp_path, version=6))
    assert refusal.reason == er.ERROR_REASON_WEIGHT_VERSION_STALE
    assert not engine.loaded


async def test_changed_or_missing_file_is_refused_and_loads_nothing(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path)
    record = weights_file(tmp_path)
    Path(record.path).write_bytes(b"changed")
    assert (await refusal_of(weights, record)).facts == {"parameter": "sha256"}
    Path(record.path).unlink()
    assert (await refusal_of(weights, record)).facts == {"parameter": "path"}
    assert not engine.loaded
    assert read_weight_record(tmp_path / "state") is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (EngineUnavailableError("half-way"), er.ERROR_REASON_ENGINE_UNAVAILABLE),
        (EngineRefusalError("another model", parameter="path"), er.ERROR_REASON_REQUEST_REFUSED),
        (ValueError("stale"), er.ERROR_REASON_WEIGHT_VERSION_STALE),
    ],
)
async def test_failed_load_is_told_and_not_remembered(
    fault: Exception, reason: er.ErrorReason.ValueType, tmp_path: Path
) -> None:
    engine, weights = await started(tmp_path)
    engine.fault = fault
    refusal = await refusal_of(weights, weights_file(tmp_path))
    assert refusal.reason == reason
    assert "half-way" not in refusal.message
    assert read_weight_record(tmp_path / "state") is None


async def test_caller_that_gives_up_leaves_no_unrecorded_weights(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path)
    engine.loading = asyncio.Event()
    record = weights_file(tmp_path)
    update = asyncio.ensure_future(weights.update(record))
    await asyncio.sleep(0)
    update.cancel()
    await asyncio.wait({update})
    engine.loading.set()
    await weights.settle()
    assert engine.describe().weight_version == 1
    assert read_weight_record(tmp_path / "state") == loaded_by(engine, record)


async def test_updates_come_one_after_the_other(tmp_path: Path) -> None:
    engine, weights = await started(tmp_path)
    records = [weights_file(tmp_path, b"%d" % version, version) for version in (1, 2, 3)]
    assert await asyncio.gather(*map(weights.update, records)) == [1, 2, 3]
    assert [version for _, version in engine.loaded] == [1, 2, 3]


async def test_restart_loads_the_last_update_again(tmp_path: Path) -> None:
    _, weights = await started(tmp_path)
    record = weights_file(tmp_path, version=4)
    await weights.update(record)
    engine, weights = await started(tmp_path)
    await weights.restore()
    assert engine.describe().weight_version == 4
    assert await weights.update(record) == 4
    assert len(engine.loaded) == 1


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
async def test_restart_does_not_load_another_file(change: object, tmp_path: Path) -> None:
    _, weights = await started(tmp_path)
    record = weights_file(tmp_path, version=4)
    await weights.update(record)
    assert callable(change)
    change(Path(record.path))
    engine, weights = await started(tmp_path)
    await weights.restore()
    assert engine.describe().weight_version == 0
    assert not engine.loaded


async def test_restart_on_newer_weights_keeps_them(tmp_path: Path) -> None:
    _, weights = await started(tmp_path)
    await weights.update(weights_file(tmp_path, version=4))
    engine, weights = await started(tmp_path, version=9)
    await weights.restore()
    assert engine.describe().weight_version == 9


@pytest.mark.parametrize("content", [b"", b"{}", b'{"path":"p","version":"x","sha256":""}', b"[]"])
def test_damaged_record_is_not_taken_for_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.json"):
        read_weight_record(tmp_path)


def test_unfinished_record_leaves_the_old_one(tmp_path: Path) -> None:
    record = WeightRecord("a", 1, bytes(32))
    write_weight_record(tmp_path, record)
    (tmp_path / "weights.json.new").write_bytes(b"torn")
    assert read_weight_record(tmp_path) == record
    later = WeightRecord("b", 2, bytes(32))
    write_weight_record(tmp_path, later)
    assert read_weight_record(tmp_path) == later


async def test_weights_of_another_model_are_not_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, weights = await started(tmp_path)
    record = weights_file(tmp_path)
    await weights.update(record)
    foreign = replace(loaded_by(engine, record), configuration_digest=bytes(32))
    write_weight_record(tmp_path / "state", foreign)
    other, restored = await started(tmp_path)
    await restored.restore()
    assert (other.loaded, other.describe().weight_version) == ([], 0)
    assert "another model" in caplog.text
