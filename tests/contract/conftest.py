"""Channels over a socket and within the process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from callforest_mesh.chassis.server import ServerOptions
from tests.contract.channel_rig import Rig


@pytest.fixture(params=["socket", "local"])
async def open_rig(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    rigs = []

    async def open_one(**options: object) -> Rig:
        rig = Rig(request.param, tmp_path, ServerOptions(**options))
        rigs.append(rig)
        await rig.open()
        return rig

    yield open_one
    for rig in rigs:
        await rig.close()


@pytest.fixture
async def rig(open_rig: Callable[..., Awaitable[Rig]]) -> Rig:
    return await open_rig()
