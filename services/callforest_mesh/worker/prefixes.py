"""Where a predecessor's tokens come from: this worker's memory, or the store."""

from __future__ import annotations

from callforest.capture.v1 import capture_admission_pb2, item_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.codec import ColumnError, ids_from_bytes
from callforest_client.errors import CallforestError, reason_name
from callforest_client.staging import StagingClient
from callforest_core.custody.call import CallIdentity
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker import core
from callforest_mesh.worker.prefix_cache import PrefixCache

_HELD_MAX = 64
"""Most calls that a query may name as held."""


class Prefixes:
    """Finds the tokens that a continuation inherits, and proves that they are the recorded ones.

    Args:
        staging: the store.
        bytes_max: memory for whole sequences.
        timeout_s: how long a fetch may take.
    """

    def __init__(self, staging: StagingClient, *, bytes_max: int, timeout_s: float) -> None:
        self._staging = staging
        self._timeout_s = timeout_s
        self._cache = PrefixCache(bytes_max)

    def keep(self, tenant: str, identity: CallIdentity, sequence: core.Sequence) -> None:
        """Remember the sequence of a call that is staged."""
        self._cache.put(tenant, identity.capture_key, identity.call_id, sequence)

    async def resolve(
        self, context: item_pb2.ItemContext, admission: capture_admission_pb2.CaptureAdmission
    ) -> core.Sequence:
        """Give the admitted predecessor's whole sequence.

        Raises:
            PrefixUnavailableError: it cannot be had in time, or its chain hash is not the admitted
                one.
        """
        wanted = admission.continuation
        # A restored predecessor is another attempt's, and so is all that it continues.
        tenant, capture_key = context.tenant, wanted.parent_capture_key or admission.capture_key
        kept = self._cache.get(tenant, capture_key, wanted.parent_call_id)
        if kept is not None:
            if core.admitted(kept, wanted):
                return kept
            self._cache.drop(tenant, capture_key, wanted.parent_call_id)
        held = self._cache.held(tenant, capture_key, _HELD_MAX)
        query = pb.PrefixQuery(
            capture_key=capture_key, call_id=wanted.parent_call_id, held_call_ids=list(held)
        )
        sequence = _assemble(await self._fetch(context, query), held)
        if not core.admitted(sequence, wanted):
            raise core.PrefixUnavailableError(
                f"the store's {len(sequence.path)} tokens of {capture_key}/{wanted.parent_call_id}"
                " are not "
                f"the {wanted.prev_token_count} that the ledger recorded"
            )
        self._cache.put(tenant, capture_key, wanted.parent_call_id, sequence)
        return sequence

    async def _fetch(self, context: item_pb2.ItemContext, query: pb.PrefixQuery) -> pb.Prefix:
        try:
            return await self._staging.for_tenant(context.tenant).fetch_prefix(
                query,
                timeout_s=min(self._timeout_s, context.timeout_ms / 4000),
                traceparent=context.traceparent,
            )
        except CallforestError as error:
            name = f"{query.capture_key}/{query.call_id}"
            detail = f"{name}: {reason_name(error.reason)}: {error.message}"
            raise core.PrefixUnavailableError(detail) from error


def _assemble(prefix: pb.Prefix, held: dict[str, core.Sequence]) -> core.Sequence:
    base: core.Sequence | None = None
    if prefix.HasField("held_call_id"):
        base = held.get(prefix.held_call_id)
        if base is None:
            raise core.PrefixUnavailableError(f"{prefix.held_call_id} is not held here")
    return core.extend(base, [_token_ids(delta) for delta in prefix.deltas])


def _token_ids(delta: pb.PrefixDelta) -> TokenIds:
    try:
        return ids_from_bytes(delta.token_ids)
    except ColumnError as error:
        raise core.PrefixUnavailableError(f"{delta.call_id}: {error}") from error
