"""The announcement of a call: with what it is made, and when it is made once more."""

from __future__ import annotations

from callforest.capture.v1 import capture_admission_pb2
from callforest_client.admission import AdmissionClient
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.gateway import core
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.life import Life


class Admitting:
    """Announces calls and learns what may be captured of them.

    Args:
        admission: judges calls.
        configuration: of the engine; each call names it.
    """

    def __init__(self, admission: AdmissionClient, configuration: EngineConfiguration) -> None:
        self._admission = admission
        self._configuration = configuration

    async def verdict(self, life: Life) -> capture_admission_pb2.Verdict:
        """Announce a call; `life.intent` is set from the moment at which that may be durable.

        Raises:
            CallforestError: the engine's configuration is not known, or admission did not answer.
        """
        digest = await self._configuration.digest()
        verdict = await self._announce(life, digest)
        if core.is_configuration_change(verdict.refused.reason):
            # A refusal is stored nowhere. It may be this gateway that was behind.
            self._configuration.forget(digest)
            present = await self._configuration.digest()
            if present != digest:
                return await self._announce(life, present)
        return verdict

    async def _announce(self, life: Life, digest: bytes) -> capture_admission_pb2.Verdict:
        life.intent = core.intent_of(
            life.request, life.capture_key, life.call_id, life.admit_time, digest
        )
        failpoint("gateway.before_intent")
        return await self._admission.admit(life.intent, traceparent=life.traceparent)
