"""`callforest show` and `verify` say what they found even where something cannot be done."""

from pathlib import Path

import pytest

from callforest.capture.v1 import receipt_pb2, staged_call_pb2
from callforest_client.ledger import Manifest
from callforest_mesh import inspection
from callforest_mesh.chassis.configuration import MeshConfiguration
from tests.unit.mesh.attempts import manifest, record

CONFIGURATION = MeshConfiguration()


def test_a_graph_with_too_many_calls_does_not_keep_the_report_from_being_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = manifest(*(record(f"c{number}") for number in range(2001)))

    async def read(
        configuration: MeshConfiguration, name: str
    ) -> tuple[list[Manifest], receipt_pb2.Receipt | None]:
        return [many], None

    monkeypatch.setattr(inspection, "_read", read)
    lines, status = inspection.show(CONFIGURATION, "r1", tmp_path / "calls.svg")
    assert status == 1
    assert lines[0] == "attempt r1  sealed  epoch 4  revision 9"
    assert lines[-1] == "not drawn: more than 2000 calls cannot be drawn"
    assert not (tmp_path / "calls.svg").exists()


def test_staged_columns_that_are_not_whole_words_are_broken_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torn = staged_call_pb2.StagedCall(capture_key="r1", call_id="a")
    torn.canonical.token_ids = b"\x00\x01\x02"

    async def read(
        configuration: MeshConfiguration, capture_key: str
    ) -> tuple[Manifest, list[staged_call_pb2.StagedCall]]:
        return manifest(record("a")), [torn]

    monkeypatch.setattr(inspection, "_read_staged", read)
    lines, status = inspection.verify(CONFIGURATION, "r1")
    assert status == 1
    assert lines == ["broken: 3 bytes are not whole words of 4"]
