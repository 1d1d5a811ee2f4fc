"""One run of the engine's process, spoken to in the words of the `Engine` port."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import engine_service_pb2 as pb
from callforest.worker.v1 import engine_service_pb2_grpc as pb_grpc
from callforest_client.errors import CallforestError
from callforest_mesh.chassis.child_process import ChildLostError, ChildProcess
from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
)
from callforest_mesh.worker.vllm.engine_messages import (
    describe_from_message,
    measure_from_message,
    request_to_message,
    result_from_message,
)
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions


class StaleWeightsError(ValueError):
    """The version to load does not exceed what the engine serves.

    Attributes:
        served: the version that it serves.
    """

    def __init__(self, message: str, served: int) -> None:
        super().__init__(message)
        self.served = served


class EngineProcess:
    """The process of one engine; it runs once."""

    def __init__(self, child: ChildProcess, limits: VllmLimits) -> None:
        self._child = child
        self._limits = limits
        self._stub = pb_grpc.EngineServiceStub(child.channel)

    @classmethod
    async def spawn(
        cls, command: Sequence[str], options: VllmOptions, limits: VllmLimits
    ) -> EngineProcess:
        """Start `command`, told its socket by `--socket PATH`.

        Raises:
            EngineUnavailableError: the command cannot be run.
        """
        try:
            child = await ChildProcess.spawn(
                command, name="engine", environment=options.environment
            )
        except ChildLostError as error:
            raise EngineUnavailableError(str(error)) from error
        return cls(child, limits)

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._child.pid

    async def wait_ready(self) -> EngineDescription:
        """Wait until the engine can generate.

        Raises:
            EngineUnavailableError: the process ended, or did not get ready in time.
        """
        try:
            await self._child.wait_ready(self._limits.start_s)
            call = self._stub.DescribeEngine(
                pb.DescribeEngineRequest(), timeout=self._limits.start_s
            )
            return describe_from_message(await self._child.answer_of(call))
        except (CallforestError, ChildLostError) as error:
            raise EngineUnavailableError(str(error)) from error

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Generate one response; see `Engine.generate`."""
        call = self._stub.RunEngine(request_to_message(request), timeout=self._limits.generate_s)
        try:
            return result_from_message(await self._child.answer_of(call))
        except (CallforestError, ChildLostError) as error:
            raise _port_error(error) from error

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        """Count the tokens of a prompt; see `Engine.measure`."""
        call = self._stub.MeasureEngine(
            pb.MeasureEngineRequest(run=request_to_message(request)), timeout=self._limits.measure_s
        )
        try:
            return measure_from_message(await self._child.answer_of(call))
        except (CallforestError, ChildLostError) as error:
            raise _port_error(error) from error

    async def load_weights(self, path: str, version: int) -> None:
        """Load new weights; see `Engine.update_weights`.

        Raises:
            StaleWeightsError: the version does not exceed the present one.
        """
        call = self._stub.LoadWeights(
            pb.LoadWeightsRequest(path=path, weight_version=version), timeout=self._limits.load_s
        )
        try:
            await self._child.answer_of(call)
        except (CallforestError, ChildLostError) as error:
            raise _port_error(error) from error

    async def wait_ended(self) -> int:
        """Wait until the process has ended; return its exit status."""
        return await self._child.wait_ended()

    def log_tail(self) -> str:
        """Return the end of what the process wrote."""
        return self._child.log_tail()

    async def end(self, *, politely: bool) -> None:
        """End the process and all it started. Idempotent.

        Args:
            politely: give it `stop_s` to end by itself first.
        """
        await self._child.end(grace_s=self._limits.stop_s if politely else 0.0)


def _port_error(error: CallforestError | ChildLostError) -> Exception:
    """Return the port's exception for an error of the line."""
    if isinstance(error, ChildLostError):
        return EngineUnavailableError(str(error))
    if error.reason == er.ERROR_REASON_REQUEST_REFUSED:
        return EngineRefusalError(error.message, parameter=error.metadata.get("parameter", ""))
    if error.reason == er.ERROR_REASON_INVALID_MESSAGE:
        # The guard of the engine's server refused what no engine could read.
        return EngineRefusalError(error.message)
    if error.reason == er.ERROR_REASON_WEIGHT_VERSION_STALE:
        return StaleWeightsError(error.message, int(error.metadata["current_version"]))
    if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Larger than the line carries: a repeat fails alike.
        return EngineRefusalError(error.message, parameter="messages")
    return EngineUnavailableError(error.message or error.code.name)
