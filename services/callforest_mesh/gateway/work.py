"""What harnesses may ask on either edge: a call, or its size."""

from __future__ import annotations

from typing import NamedTuple

from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.core import RequestReader
from callforest_mesh.gateway.measuring import Measuring


class Work(NamedTuple):
    """What both edges share.

    Attributes:
        reader: reads requests in the gateway's capture mode.
        calls: the calls' lives.
        measuring: sizes of calls that are not made.
    """

    reader: RequestReader
    calls: Calls
    measuring: Measuring
