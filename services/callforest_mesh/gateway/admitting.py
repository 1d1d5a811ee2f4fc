"""The announcement of a call: with what it is made, and when it is made once more."""

from __future__ import annotations

from typing import Final

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.admission import AdmissionClient
from callforest_client.errors import RefusedError
from callforest_core.lineage.source import SOURCE_VERSION
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.gateway import core
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.life import Life
from callforest_mesh.gateway.refusals import refused_verdict

_CLOSED: Final = frozenset({er.ERROR_REASON_ATTEMPT_CLOSED, er.ERROR_REASON_ATTEMPT_SEALED})
_FULL: Final = "open"
"""The state of an attempt that is closed only because it has as many calls as it may."""


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

        What may be a repeat is looked for before anything else is asked: neither its history nor
        the engine need be there.

        Raises:
            CallforestError: the engine's configuration is not known, or admission did not answer.
            HttpRefusal: it is no repeat, and something is lacking to make it.
        """
        is_ready = life.lacking is None and self._configuration.is_known
        if life.identity.may_repeat and not is_ready:
            known = await self._look_up(life)
            if known is not None:
                return known
        if life.lacking is not None:
            raise life.lacking
        digest = await self._configuration.digest()
        verdict = await self._announce(life, digest)
        if core.is_configuration_change(verdict.refused.reason):
            # A refusal is stored nowhere. It may be this gateway that was behind.
            self._configuration.forget(digest)
            present = await self._configuration.digest()
            if present != digest:
                return await self._announce(life, present)
        return verdict

    async def require_generation(self, life: Life) -> None:
        """Let a call that was announced before be generated (again).

        Raises:
            HttpRefusal: its attempt takes no calls any more, or had another engine; or its history
                is not here.
            CallforestError: the engine's configuration is not known, or admission did not answer.
        """
        if life.lacking is not None:
            raise life.lacking
        life.intent = self._intent(life, await self._configuration.digest())
        refused = (await self._admission.measure(life.intent)).refused
        is_closed = refused.reason in _CLOSED and refused.metadata.get("state") != _FULL
        if is_closed or core.is_configuration_change(refused.reason):
            raise refused_verdict(life.capture_key, life.call_id, refused)

    async def _announce(self, life: Life, digest: bytes) -> capture_admission_pb2.Verdict:
        life.intent = self._intent(life, digest)
        failpoint("gateway.before_intent")
        return await self._admission.admit(life.intent, traceparent=life.traceparent)

    async def _look_up(self, life: Life) -> capture_admission_pb2.Verdict | None:
        """Learn what is known of a call, announcing nothing; None when nothing is.

        The intent names no engine, and forest mode takes none without; its probe is of forest mode,
        and chain mode takes none of those. So nothing but a repeat can come of it.
        """
        intent = attempt_pb2.CallIntent(
            capture_key=life.capture_key,
            call_id=life.call_id,
            admit_time=life.admit_time,
            body_digest=life.request.body_digest,
            source=capture_admission_pb2.SourceProbe(
                normalization_version=SOURCE_VERSION, render_digest=bytes(32)
            ),
        )
        _identify(intent, life)
        try:
            verdict = await self._admission.admit(intent, traceparent=life.traceparent)
        except RefusedError as error:
            if error.reason == er.ERROR_REASON_INVALID_MESSAGE:
                return None
            raise
        unmade = verdict.refused.reason == er.ERROR_REASON_MODE_MISMATCH
        return None if unmade else verdict

    def _intent(self, life: Life, digest: bytes) -> attempt_pb2.CallIntent:
        intent = core.intent_of(
            life.request, life.capture_key, life.call_id, life.admit_time, digest
        )
        _identify(intent, life)
        return intent


def _identify(intent: attempt_pb2.CallIntent, life: Life) -> None:
    intent.is_keyed = bool(life.identity.call_id)
    intent.is_retry = life.identity.is_marked
