"""EngineService in the engine's own process: request -> engine -> response."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeAlias, TypeVar

import grpc.aio

from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import engine_service_pb2 as pb
from callforest.worker.v1 import engine_service_pb2_grpc as pb_grpc
from callforest_core.custody.errors import CandidateWithoutProofError
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.worker.engine import (
    Engine,
    EngineRefusalError,
    EngineRequest,
    EngineUnavailableError,
)
from callforest_mesh.worker.vllm.engine_messages import (
    describe_to_message,
    measure_to_message,
    request_from_message,
    result_to_message,
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]


class EngineServicer(pb_grpc.EngineServiceServicer):
    """Serves one engine to the worker that started its process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def DescribeEngine(
        self,
        request: pb.DescribeEngineRequest,
        context: _Context[pb.DescribeEngineRequest, pb.DescribeEngineResponse],
    ) -> pb.DescribeEngineResponse:
        """Describe the engine."""
        with _refusing():
            return describe_to_message(self._engine.describe())

    async def RunEngine(
        self,
        request: pb.RunEngineRequest,
        context: _Context[pb.RunEngineRequest, pb.RunEngineResponse],
    ) -> pb.RunEngineResponse:
        """Generate one response."""
        asked = _read_request(request)
        with _refusing():
            return result_to_message(await self._engine.generate(asked))

    async def MeasureEngine(
        self,
        request: pb.MeasureEngineRequest,
        context: _Context[pb.MeasureEngineRequest, pb.MeasureEngineResponse],
    ) -> pb.MeasureEngineResponse:
        """Count the tokens of a prompt."""
        asked = _read_request(request.run)
        with _refusing():
            return measure_to_message(await self._engine.measure(asked))

    async def LoadWeights(
        self,
        request: pb.LoadWeightsRequest,
        context: _Context[pb.LoadWeightsRequest, pb.LoadWeightsResponse],
    ) -> pb.LoadWeightsResponse:
        """Load new weights."""
        try:
            with _refusing():
                await self._engine.update_weights(request.path, request.weight_version)
        except ValueError as error:
            raise Refusal(
                er.ERROR_REASON_WEIGHT_VERSION_STALE,
                str(error),
                version=request.weight_version,
                current_version=self._engine.describe().weight_version,
            ) from error
        return pb.LoadWeightsResponse(weight_version=request.weight_version)


def _read_request(request: pb.RunEngineRequest) -> EngineRequest:
    try:
        return request_from_message(request)
    except ValueError as error:
        fault = [("prefix_token_ids", "must be whole 4-byte words")]
        raise malformed("RunEngineRequest", "the prefix is broken", fault) from error


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn what an engine raises into what its caller sees.

    Raises:
        Refusal: INVALID_MESSAGE, REQUEST_REFUSED or ENGINE_UNAVAILABLE.
    """
    try:
        yield
    except CandidateWithoutProofError as error:
        fault = [("history_match", "must say in which sense the histories match")]
        raise malformed("RunEngineRequest", "the evidence proves nothing", fault) from error
    except EngineRefusalError as error:
        refused = er.ERROR_REASON_REQUEST_REFUSED
        raise Refusal(refused, str(error), parameter=error.parameter) from error
    except EngineUnavailableError as error:
        away = er.ERROR_REASON_ENGINE_UNAVAILABLE
        raise Refusal(away, str(error), engine="vllm") from error
