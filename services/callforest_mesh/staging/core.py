"""What Staging decides: whether a call is what it says, who won, where a prefix starts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from callforest.capture.v1 import staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.codec import coords_of, staged_call_from_proto
from callforest_core.custody.attempts import may_own_parent
from callforest_core.custody.call import StagedCall
from callforest_core.custody.digests import (
    DigestInputError,
    chain_hash_encoded,
    cumulative_hash_encoded,
    digest_opening,
)
from callforest_core.custody.extras import extras_digest
from callforest_core.custody.tokens import encode_floats, encode_ids
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.validation import malformed

DURABLE_STORES: Final = frozenset({"lmdb"})
CHAIN_CALLS_MAX: Final = 65_536
"""Most calls of one chain, through earlier attempts too: more would be a loop."""
PREFIX_BYTES_MAX: Final = (64 << 20) - (4 << 20)
"""Token bytes of one prefix; with its ids it must fit into one framed payload of 64 MiB."""
_WORD_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class CallLink:
    """Where a staged call stands in its chain.

    Attributes:
        parent_call_id: the call that it continues, or None for a root.
        prev_len: tokens inherited; the parent must end there.
        delta_len: tokens added.
        parent_capture_key: the earlier attempt under which the parent is staged; "" for the call's
            own.
    """

    parent_call_id: str | None
    prev_len: int
    delta_len: int
    parent_capture_key: str = ""

    @property
    def cum_len(self) -> int:
        """Tokens from the root to the end of the call."""
        return self.prev_len + self.delta_len


class StagedName(NamedTuple):
    """Names a staged call: the attempt that it is staged under, and the call."""

    capture_key: str
    call_id: str


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The calls whose deltas a caller lacks.

    Attributes:
        held_call_id: the held call that they follow, or None when they start at a root.
        names: from the oldest to the queried call.
    """

    held_call_id: str | None
    names: tuple[StagedName, ...]


def check_store(store: str) -> None:
    """Refuse a store that can lose or evict what it acknowledged.

    Raises:
        Refusal: VOLATILE_STORE.
    """
    if store not in DURABLE_STORES:
        raise Refusal(
            er.ERROR_REASON_VOLATILE_STORE,
            f"staged calls must survive a power cut: configure one of {sorted(DURABLE_STORES)}",
            store=store,
        )


def check_call(message: staged_call_pb2.StagedCall) -> None:
    """Hold a well-formed call against its own digests.

    A root's chain hash and cumulative hash are checked too; those of a continuation also cover
    tokens that the call does not hold, and are checked when its path is joined.

    Raises:
        Refusal: DIGEST_MISMATCH names the field; INVALID_MESSAGE for a logprob that is not finite
            or a parent's owner that is no earlier attempt.
    """
    _check_form(message)
    call = staged_call_from_proto(message)
    if not np.isfinite(call.logprobs).all():
        raise _malformed(message, "canonical.logprobs", "must be finite")
    if extras_digest(call.extras) != call.extras_digest:
        raise _mismatch(call, "extras_digest")
    encoded = encode_ids(call.token_ids)
    if call.identity.parent_call_id is None:
        if chain_hash_encoded(None, encoded) != call.chain_hash:
            raise _mismatch(call, "chain_hash")
        if cumulative_hash_encoded(encoded) != call.cumulative_hash:
            raise _mismatch(call, "cumulative_hash")
    try:
        opening = digest_opening(call.identity.capture_key)
        digest = call.recompute_digest(opening, encoded, encode_floats(call.logprobs))
    except DigestInputError as error:
        raise _mismatch(call, "digest") from error
    if digest != call.digest:
        raise _mismatch(call, "digest")


def receipt_of(
    offered: staged_call_pb2.StagedCall, stored: staged_call_pb2.StagedCall | None
) -> pb.StagedReceipt:
    """Make the answer to a call that is durable now.

    Args:
        offered: the call that was to be stored.
        stored: the call that was stored under its id before, or None.
    """
    if stored is None or _is_same(offered, stored):
        return pb.StagedReceipt(coords=coords_of(offered))
    winner = pb.StagedWinner(served_response=stored.served_response, completion=stored.completion)
    if stored.HasField("decision"):
        winner.decision.CopyFrom(stored.decision)
    return pb.StagedReceipt(coords=coords_of(stored), winner=winner)


def strip_columns(call: staged_call_pb2.StagedCall) -> None:
    """Take out of a call what a repeat does not need: tokens, log-probabilities and extras."""
    call.canonical.ClearField("token_ids")
    call.canonical.ClearField("logprobs")
    call.ClearField("extras")


def plan_prefix(
    find: Callable[[StagedName], CallLink | None], query: pb.PrefixQuery, held: Collection[str]
) -> PrefixPlan:
    """Walk from a call to the first held one, or to its root, through earlier attempts as well.

    Args:
        find: gives the link of a call, or None when it is not staged.
        query: names the last call.
        held: calls of the queried attempt whose whole sequences the caller has; one of the same id
            in an earlier attempt is another call. A held call that is no longer staged is the
            caller's to vouch for.

    Raises:
        Refusal: CALL_NOT_FOUND for the last call, PREFIX_BROKEN for its ancestors,
            MESSAGE_TOO_LARGE when the tokens exceed what one payload may hold.
    """
    name: StagedName | None = StagedName(query.capture_key, query.call_id)
    link = find(StagedName(query.capture_key, query.call_id))
    if link is None:
        raise call_not_found(query.capture_key, query.call_id)
    lacking: list[StagedName] = []
    size = 0
    held_names = {StagedName(query.capture_key, call_id) for call_id in held}
    while name is not None and name not in held_names:
        lacking.append(name)
        size += link.delta_len * _WORD_BYTES
        if len(lacking) > CHAIN_CALLS_MAX:
            raise _broken(query, f"the chain is longer than {CHAIN_CALLS_MAX} calls", name.call_id)
        start, name = link.prev_len, _parent_name(name, link)
        if (name is None) != (start == 0):
            missing = None if name is None else name.call_id
            raise _broken(query, "exactly a root starts at token 0", missing)
        if name is None:
            break
        parent = find(name)
        if parent is None:
            if name in held_names:
                break
            where = "" if name.capture_key == query.capture_key else f" under {name.capture_key}"
            raise _broken(query, f"an ancestor is not staged{where}", name.call_id)
        if parent.cum_len != start:
            raise _broken(query, f"an ancestor does not end at token {start}", name.call_id)
        link = parent
    if size > PREFIX_BYTES_MAX:
        raise Refusal(
            er.ERROR_REASON_MESSAGE_TOO_LARGE,
            "the prefix is larger than one payload; fetch its calls",
            size_bytes=size,
            limit_bytes=PREFIX_BYTES_MAX,
            use_method="Fetch",
        )
    return PrefixPlan(None if name is None else name.call_id, tuple(reversed(lacking)))


def call_not_found(capture_key: str, call_id: str) -> Refusal:
    """Make the refusal of a call that is not staged."""
    return Refusal(
        er.ERROR_REASON_CALL_NOT_FOUND,
        "no such call is staged",
        capture_key=capture_key,
        call_id=call_id,
    )


def partition_dropped(capture_key: str, call_id: str) -> Refusal:
    """Make the refusal of a call that comes after its attempt was torn down."""
    return Refusal(
        er.ERROR_REASON_PARTITION_DROPPED,
        "the attempt's staged calls were torn down; nothing more is stored",
        capture_key=capture_key,
        call_id=call_id,
    )


def _check_form(message: staged_call_pb2.StagedCall) -> None:
    """Refuse a parent's owner that cannot be; no digest covers it (ADM-9)."""
    owner, has_parent = message.parent_capture_key, message.HasField("parent_call_id")
    if not may_own_parent(owner, message.capture_key, has_parent=has_parent):
        fault = "must name an earlier attempt of the rollout, of a parent"
        raise _malformed(message, "parent_capture_key", fault)


def _malformed(message: staged_call_pb2.StagedCall, field: str, fault: str) -> Refusal:
    return malformed(message.DESCRIPTOR.full_name, f"{field}: {fault}", [(field, fault)])


def _parent_name(name: StagedName, link: CallLink) -> StagedName | None:
    if link.parent_call_id is None:
        return None
    return StagedName(link.parent_capture_key or name.capture_key, link.parent_call_id)


def _is_same(offered: staged_call_pb2.StagedCall, stored: staged_call_pb2.StagedCall) -> bool:
    return (
        offered.digest == stored.digest
        and offered.served_response == stored.served_response
        and offered.completion == stored.completion
        and offered.decision == stored.decision
        and offered.parent_capture_key == stored.parent_capture_key
    )


def _mismatch(call: StagedCall, field: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_DIGEST_MISMATCH,
        f"the call's {field} is not that of its contents",
        capture_key=call.identity.capture_key,
        call_id=call.identity.call_id,
        field=field,
    )


def _broken(query: pb.PrefixQuery, detail: str, missing_call_id: str | None) -> Refusal:
    return Refusal(
        er.ERROR_REASON_PREFIX_BROKEN,
        f"the call cannot be continued exactly: {detail}",
        capture_key=query.capture_key,
        call_id=query.call_id,
        missing_call_id=missing_call_id,
    )
