"""EngineService in the engine's own process: request -> engine -> response."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NoReturn, TypeAlias, TypeVar

import grpc.aio
from grpc_status import rpc_status

from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import engine_service_pb2 as pb
from callforest.worker.v1 import engine_service_pb2_grpc as pb_grpc
from callforest_client.errors import status_of
from callforest_core.refusal import Refusal
from callforest_mesh.worker.engine import (
    Engine,
    EngineRefusalError,
    EngineUnavailableError,
)
from callforest_mesh.worker.vllm.engine_messages import (
    describe_to_message,
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

    async def DescribeEngine(  # noqa: N802 - the method's name in the schema
        self,
        request: pb.DescribeEngineRequest,  # noqa: ARG002
        context: _Context[pb.DescribeEngineRequest, pb.DescribeEngineResponse],
    ) -> pb.DescribeEngineResponse:
        """Describe the engine."""
        try:
            return describe_to_message(self._engine.describe())
        except EngineUnavailableError as error:
            await _abort(context, _unavailable(error))

    async def RunEngine(  # noqa: N802 - the method's name in the schema
        self,
        request: pb.RunEngineRequest,
        context: _Context[pb.RunEngineRequest, pb.RunEngineResponse],
    ) -> pb.RunEngineResponse:
        """Generate one response."""
        try:
            result = await self._engine.generate(request_from_message(request))
            return result_to_message(result)
        except EngineRefusalError as error:
            await _abort(context, _refused(error))
        except EngineUnavailableError as error:
            await _abort(context, _unavailable(error))

    async def LoadWeights(  # noqa: N802 - the method's name in the schema
        self,
        request: pb.LoadWeightsRequest,
        context: _Context[pb.LoadWeightsRequest, pb.LoadWeightsResponse],
    ) -> pb.LoadWeightsResponse:
        """Load new weights."""
        try:
            await self._engine.update_weights(request.path, request.weight_version)
        except EngineRefusalError as error:
            await _abort(context, _refused(error))
        except EngineUnavailableError as error:
            await _abort(context, _unavailable(error))
        except ValueError as error:
            await _abort(
                context,
                Refusal(
                    er.ERROR_REASON_WEIGHT_VERSION_STALE,
                    str(error),
                    version=request.weight_version,
                    current_version=self._engine.describe().weight_version,
                ),
            )
        return pb.LoadWeightsResponse(weight_version=request.weight_version)


def _refused(error: EngineRefusalError) -> Refusal:
    return Refusal(er.ERROR_REASON_REQUEST_REFUSED, str(error), parameter=error.parameter)


def _unavailable(error: EngineUnavailableError) -> Refusal:
    return Refusal(er.ERROR_REASON_ENGINE_UNAVAILABLE, str(error), engine="vllm")


async def _abort(context: _Context[_Request, _Response], refusal: Refusal) -> NoReturn:
    status = rpc_status.to_status(status_of(refusal))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returns never")
