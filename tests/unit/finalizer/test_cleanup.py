"""The duty to clean behind the committed cursor outlasts a full store."""

import asyncio

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer import cleanup


class FullLog:
    """A row log whose store has no room for the cleaned cursor at first."""

    def __init__(self, *refusals: Refusal) -> None:
        self.refusals = list(refusals)
        self.cleaned_cursor = 0

    def state(self, _tenant: str) -> row_log_pb2.RowLogState:
        return row_log_pb2.RowLogState(committed_cursor=1, cleaned_cursor=self.cleaned_cursor)

    def at(self, _tenant: str, _cursor: int) -> None:
        return None

    async def cleaned(self, _tenant: str, cursor: int) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.cleaned_cursor = cursor


@pytest.mark.requirement("FIN-3", "OPS-3")
@pytest.mark.parametrize(("delay_ms", "cleaned"), [(5000, 1), (None, 0)])
async def test_a_full_store_is_waited_for_and_a_damaged_one_is_not(
    monkeypatch: pytest.MonkeyPatch, delay_ms: int | None, cleaned: int
) -> None:
    monkeypatch.setattr(cleanup, "_RETRY_FIRST_S", 0.001)
    refusal = Refusal(er.ERROR_REASON_STORE_FULL, "full", retry_after_ms=delay_ms)
    log = FullLog(refusal, refusal)
    duty = cleanup.Cleanup(log, None)
    duty.wake("tenant")
    async with asyncio.timeout(10):
        await duty.settle("tenant")
    assert log.cleaned_cursor == cleaned
