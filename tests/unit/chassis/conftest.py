"""A store that is closed after its test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from callforest_mesh.chassis.lmdb_store import LmdbStore
from tests.unit.chassis.stores import Opener, make


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    @asynccontextmanager
    async def open_store(**options: object) -> AsyncIterator[LmdbStore]:
        store = make(tmp_path / "store", **options)
        try:
            yield store
        finally:
            await store.close()

    return open_store
