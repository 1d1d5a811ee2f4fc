"""EngineService in the engine's own process: request -> engine -> response."""

from __future__ import annotations

from collections.abc import Awaitable
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
        try:
            return describe_to_message(self._engine.describe())
        except EngineUnavailableError as error:
            raise _unavailable(error) from error

    async def RunEngine(
        self,
        request: pb.RunEngineRequest,
        context: _Context[pb.RunEngineRequest, pb.RunEngineResponse],
    ) -> pb.RunEngineResponse:
        """Generate one response."""
        asked = _read_request(request)
        try:
            return result_to_message(await self._engine.generate(asked))
        except CandidateWithoutProofError as error:
            raise _unproven() from error
        except EngineRefusalError as error:
            raise _refused(error) from error
        except EngineUnavailableError as error:
            raise _unavailable(error) from error

    async def MeasureEngine(
        self,
        request: pb.MeasureEngineRequest,
        context: _Context[pb.MeasureEngineRequest, pb.MeasureEngineResponse],
    ) -> pb.MeasureEngineResponse:
        """Count the tokens of a prompt."""
        asked = _read_request(request.run)
        try:
            return measure_to_message(await self._engine.measure(asked))
        except CandidateWithoutProofError as error:
            raise _unproven() from error
        except EngineRefusalError as error:
            raise _refused(error) from error
        except EngineUnavailableError as error:
            raise _unavailable(error) from error

    async def LoadWeights(
        self,
        request: pb.LoadWeightsRequest,
        context: _Context[pb.LoadWeightsRequest, pb.LoadWeightsResponse],
    ) -> pb.LoadWeightsResponse:
        """Load new weights."""
        try:
            await self._engine.update_weights(request.path, request.weight_version)
        except EngineRefusalError as error:
            raise _refused(error) from error
        except EngineUnavailableError as error:
            raise _unavailable(error) from error
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


def _unproven() -> Refusal:
    fault = [("history_match", "must say in which sense the histories match")]
    return malformed("RunEngineRequest", "the evidence proves nothing", fault)


def _refused(error: EngineRefusalError) -> Refusal:
    return Refusal(er.ERROR_REASON_REQUEST_REFUSED, str(error), parameter=error.parameter)


def _unavailable(error: EngineUnavailableError) -> Refusal:
    return Refusal(er.ERROR_REASON_ENGINE_UNAVAILABLE, str(error), engine="vllm")
