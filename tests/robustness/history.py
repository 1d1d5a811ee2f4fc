"""What was acknowledged during a run, and what the stores say of it afterwards.

Whoever drives a run writes down every answer that it got. The checks below hold that against what
is read from the services: what was acknowledged must be there once, and with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from callforest.capture.v1 import attempt_pb2, receipt_pb2, staged_call_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.trainer.v1 import trainer_service_pb2
from callforest_client.ledger import Manifest


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A response that a harness got.

    Attributes:
        capture_key: the attempt that it asked as.
        call_id: what the response's header names.
        response_id: what the response's body names.
        body: the response, byte for byte; b"" when it came as events.
    """

    capture_key: str
    call_id: str
    response_id: str
    body: bytes


@dataclass(slots=True)
class Faults:
    """What is wrong, in words, by kind."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        """Give every fault, its kind first."""
        kinds = {"lost": self.lost, "duplicated": self.duplicated, "changed": self.changed}
        return [f"{kind}: {fault}" for kind, faults in kinds.items() for fault in faults]

    def extend(self, other: Faults) -> None:
        """Add another's faults."""
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.changed += other.changed


@dataclass(slots=True)
class Look:
    """What the services said of an attempt when its harness was done with it.

    Attributes:
        manifest: its rows; final if it was sealed.
        staged: the tokens of each of its records, by call.
    """

    manifest: Manifest
    staged: dict[str, staged_call_pb2.StagedCall]


@dataclass(slots=True)
class History:
    """Everything that was acknowledged.

    Attributes:
        served: responses, in the order in which they came.
        looks: by attempt.
        receipts: by rollout.
        groups: publications by group.
        metrics: steps as watchers saw them, a new one for each life of the trainer.
    """

    served: list[ServedCall] = field(default_factory=list)
    looks: dict[str, Look] = field(default_factory=dict)
    receipts: dict[str, receipt_pb2.Receipt] = field(default_factory=dict)
    groups: dict[str, pb.FinalizeGroupResponse] = field(default_factory=dict)
    metrics: list[trainer_service_pb2.StepMetrics] = field(default_factory=list)


def check_calls(history: History, manifests: Mapping[str, Manifest]) -> Faults:
    """Hold every served response, and every row that was seen, against the ledger.

    Args:
        history: what was acknowledged.
        manifests: what the ledger has in the end, by attempt.
    """
    faults = Faults()
    call_ids = Counter(call.call_id for call in history.served)
    faults.duplicated += [f"call {one} was served twice" for one, n in call_ids.items() if n > 1]
    for call in history.served:
        _check_served(call, manifests.get(call.capture_key), faults)
    _check_once(manifests, faults)
    for capture_key, look in history.looks.items():
        _check_look(capture_key, look, manifests.get(capture_key), faults)
    return faults


def _check_served(call: ServedCall, manifest: Manifest | None, faults: Faults) -> None:
    """A served response has one record, or a failure row that says why it has none.

    In forest mode a failure that comes after the record is kept beside it, and the record stands.
    """
    name = f"{call.capture_key}/{call.call_id}"
    records = [] if manifest is None else manifest.records
    failed = manifest is not None and any(one.call_id == call.call_id for one in manifest.failures)
    found = [one for one in records if one.response_id == call.response_id]
    if found and manifest is not None and manifest.attempt.mode == attempt_pb2.CAPTURE_MODE_FOREST:
        failed = False
    if not found and not failed:
        faults.lost.append(f"the record of {name}")
    if found and (failed or found[0].coords.call_id != call.call_id):
        faults.changed.append(f"the record of {name}")


def _check_once(manifests: Mapping[str, Manifest], faults: Faults) -> None:
    """No call and no response has two records, in whatever attempts; a restored one is the same."""
    every = [record for manifest in manifests.values() for record in manifest.records]
    records = [record for record in every if not record.source_capture_key]
    for kind, counted in (
        ("call", Counter(record.coords.call_id for record in records)),
        ("response", Counter(record.response_id for record in records)),
    ):
        faults.duplicated += [f"records of {kind} {one}" for one, n in counted.items() if n > 1]


def _check_look(capture_key: str, look: Look, now: Manifest | None, faults: Faults) -> None:
    """What was seen is still there, in its order, and each record had its tokens."""
    rows = [one.SerializeToString(deterministic=True) for one in look.manifest.entries]
    entries = () if now is None else now.entries
    kept = [one.SerializeToString(deterministic=True) for one in entries]
    if len(kept) < len(rows):
        faults.lost.append(f"{len(rows) - len(kept)} rows of {capture_key}")
    if kept[: len(rows)] != rows[: len(kept)]:
        faults.changed.append(f"the rows of {capture_key}")
    for record in look.manifest.records:
        staged = look.staged.get(record.coords.call_id)
        if staged is None:
            faults.lost.append(f"the tokens of {capture_key}/{record.coords.call_id}")
        elif staged.digest != record.coords.digest:
            faults.changed.append(f"the tokens of {capture_key}/{record.coords.call_id}")


def check_bytes(history: History) -> Faults:
    """What the harness got is what was staged with the tokens, byte for byte."""
    faults = Faults()
    for call in history.served:
        look = history.looks.get(call.capture_key)
        staged = look.staged.get(call.call_id) if look is not None else None
        if staged is not None and call.body and staged.served_response != call.body:
            faults.changed.append(f"the response of {call.capture_key}/{call.call_id}")
    return faults


def check_receipts(
    history: History, rollouts: Sequence[str], repeated: Mapping[str, receipt_pb2.Receipt]
) -> Faults:
    """Each rollout has the receipt that was acknowledged, of the rows that its attempt had.

    Args:
        history: what was acknowledged.
        rollouts: all that were played.
        repeated: the answers of the same requests, made again in the end.
    """
    faults = Faults()
    for rollout_id in rollouts:
        receipt, again = history.receipts.get(rollout_id), repeated.get(rollout_id)
        if receipt is None or again is None:
            faults.lost.append(f"the receipt of {rollout_id}")
        elif receipt != again:
            faults.changed.append(f"the receipt of {rollout_id}")
        elif (look := history.looks.get(receipt.capture_key)) is not None:
            records = [(one.coords.call_id, one.coords.digest) for one in look.manifest.records]
            if records != [(one.call_id, one.digest) for one in receipt.calls]:
                faults.changed.append(f"the calls in the receipt of {rollout_id}")
    return faults


def check_groups(
    history: History, repeated: Mapping[str, pb.FinalizeGroupResponse], head_cursor: int
) -> Faults:
    """Each group has the one position and the rows that were acknowledged.

    Args:
        history: what was acknowledged.
        repeated: the answers of the same requests, made again in the end.
        head_cursor: the last position of the log.
    """
    faults = Faults()
    for group_id, published in history.groups.items():
        again = repeated.get(group_id)
        if again is None:
            faults.lost.append(f"group {group_id}")
        elif again != published:
            faults.changed.append(f"group {group_id}")
    taken = Counter(published.cursor for published in history.groups.values())
    faults.duplicated += [f"position {one} of the row log" for one, n in taken.items() if n > 1]
    places = len(history.groups)
    if head_cursor > places:
        faults.duplicated.append(f"{head_cursor} positions for {places} groups")
    if head_cursor < places:
        faults.lost.append(f"{head_cursor} positions for {places} groups")
    return faults


def check_metrics(
    metrics: Iterable[trainer_service_pb2.StepMetrics], issued: Container[int]
) -> Faults:
    """A weight version was issued, belongs to one step of one life, and later ones are higher.

    Args:
        metrics: as watchers saw them; a new watch of the same life begins at its beginning.
        issued: the versions that the trainer remembers to have issued.
    """
    faults = Faults()
    seen: dict[int, trainer_service_pb2.StepMetrics] = {}
    for one in metrics:
        version = one.weight_version
        known = seen.get(version)
        if version not in issued:
            faults.lost.append(f"the issue of weight version {version}")
        if known is None:
            if seen and version < max(seen):
                faults.changed.append(f"weight version {version} came behind {max(seen)}")
            seen[version] = one
        elif known != one:
            faults.duplicated.append(f"weight version {version}")
    return faults
