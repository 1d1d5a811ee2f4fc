"""`callforest show`, `explain` and `verify`: look at rollouts of a running mesh, change nothing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from callforest.capture.v1 import receipt_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_service_pb2
from callforest_client.codec import ColumnError, call_record_from_proto, staged_call_from_proto
from callforest_client.errors import CallforestError
from callforest_client.ledger import LedgerClient, Manifest
from callforest_core.custody.attempts import AttemptName, attempt_name
from callforest_core.custody.call import Receipt
from callforest_core.custody.verification import VerificationError, verify_paths
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.attempt_report import report
from callforest_mesh.call_graph import TooManyCallsError, draw
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.explanation import explain
from callforest_mesh.training_rows import row_lines, rows_of

_ATTEMPTS_MOST = 1000


def show(
    configuration: MeshConfiguration, name: str, svg: Path | None = None
) -> tuple[list[str], int]:
    """Describe an attempt, or every attempt of a rollout.

    Args:
        configuration: says where the services are, and the tenant.
        name: a rollout's id or an attempt's capture key.
        svg: where to draw the last attempt shown, or None.

    Returns:
        The lines to print, and the exit status: 1 when there is no such attempt, or it has more
        calls than can be drawn.

    Raises:
        CallforestError: a service does not answer.
    """
    manifests, receipt = asyncio.run(_read(configuration, name))
    if not manifests:
        return [f"no attempt of {name!r}"], 1
    lines = [line for manifest in manifests for line in report(manifest, receipt)]
    lines += [f"  {line}" for one in manifests for line in row_lines(rows_of(one, receipt))]
    if svg is not None:
        try:
            picture = draw(manifests[-1], receipt)
        except TooManyCallsError as error:
            return [*lines, f"not drawn: {error}"], 1
        svg.write_text(picture, "utf-8")
        lines.append(f"drew {svg}")
    return lines, 0


def explain_call(configuration: MeshConfiguration, name: str) -> tuple[list[str], int]:
    """Say why a call is what it is.

    Args:
        configuration: says where the services are, and the tenant.
        name: `CAPTURE_KEY/CALL_ID`, the call's staging key.

    Returns:
        The lines to print, and the exit status: 1 when there is no such call.

    Raises:
        CallforestError: a service does not answer.
    """
    capture_key, _, call_id = name.partition("/")
    if not call_id:
        return [f"a call is named CAPTURE_KEY/CALL_ID, not {name!r}"], 1
    found = asyncio.run(_read_call(configuration, capture_key, call_id))
    if found is None:
        return [
            f"no call {name!r}",
            "  a request that was refused is no call: its refusal (422 and its code) says why",
        ], 1
    call, receipt = found
    if receipt is not None and not _names(receipt, capture_key, call_id):
        receipt = None
    return explain(name, call, receipt), 0


def _names(receipt: receipt_pb2.Receipt, capture_key: str, call_id: str) -> bool:
    """Say whether a receipt is of an attempt, or of a later one that restored its call."""
    return receipt.capture_key == capture_key or any(
        (one.source_capture_key, one.call_id) == (capture_key, call_id) for one in receipt.calls
    )


def verify(configuration: MeshConfiguration, capture_key: str) -> tuple[list[str], int]:
    """Verify what an attempt has staged so far against its ledger, on every path.

    Args:
        configuration: says where the services are, and the tenant.
        capture_key: the attempt, running or sealed.

    Returns:
        The lines to print, and the exit status: 0 when all is intact and nothing failed, else 1.

    Raises:
        CallforestError: a service does not answer.
    """
    manifest, staged = asyncio.run(_read_staged(configuration, capture_key))
    lines = [f"poisoned: {one.call_id} {one.reason}" for one in manifest.failures]
    lines += [f"pending: {call_id}" for call_id in manifest.attempt.pending_call_ids]
    if not manifest.records:
        return [*lines, "nothing was committed"], 1
    records = tuple(call_record_from_proto(record) for record in manifest.records)
    parents = {record.parent_call_id for record in records}
    endpoints = [record.call_id for record in records if record.call_id not in parents]
    try:
        calls = [staged_call_from_proto(call) for call in staged]
        rows = verify_paths(Receipt(capture_key, records, None), calls, endpoints)
    except (ColumnError, VerificationError) as error:
        return [*lines, f"broken: {error}"], 1
    longest = max(len(row.token_ids) for row in rows)
    verdict = f"intact: {len(records)} calls on {len(rows)} paths, the longest of {longest} tokens"
    return [*lines, verdict], 1 if manifest.failures else 0


async def _read(
    configuration: MeshConfiguration, name: str
) -> tuple[list[Manifest], receipt_pb2.Receipt | None]:
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        manifests = await _manifests(clients.ledger(), name)
        receipt = await _receipt(clients, attempt_name(name).rollout_id) if manifests else None
    return manifests, receipt


async def _read_call(
    configuration: MeshConfiguration, capture_key: str, call_id: str
) -> tuple[ledger_service_pb2.GetCallResponse, receipt_pb2.Receipt | None] | None:
    absent = (er.ERROR_REASON_ATTEMPT_NOT_FOUND, er.ERROR_REASON_CALL_NOT_FOUND)
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        try:
            call = await clients.ledger().get_call(capture_key, call_id)
        except CallforestError as error:
            if error.reason not in absent:
                raise
            return None
        return call, await _receipt(clients, attempt_name(capture_key).rollout_id)


async def _read_staged(
    configuration: MeshConfiguration, capture_key: str
) -> tuple[Manifest, list[staged_call_pb2.StagedCall]]:
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        manifest = await clients.ledger().manifest(capture_key)
        names = [
            (record.source_capture_key or capture_key, record.coords.call_id)
            for record in manifest.records
        ]
        return manifest, await clients.staging().fetch_owned(names)


async def _manifests(ledger: LedgerClient, name: str) -> list[Manifest]:
    """Read the attempt of that name and, if it is a rollout's first, those after it."""
    found: list[Manifest] = []
    for number in range(_ATTEMPTS_MOST):
        try:
            found.append(await ledger.manifest(AttemptName(name, number).capture_key))
        except CallforestError as error:
            if error.reason != er.ERROR_REASON_ATTEMPT_NOT_FOUND:
                raise
            break
        if attempt_name(name).number:
            break
    return found


async def _receipt(clients: Clients, rollout_id: str) -> receipt_pb2.Receipt | None:
    try:
        return await clients.finalizer().receipt(rollout_id)
    except CallforestError as error:
        if error.reason != er.ERROR_REASON_RECEIPT_NOT_FOUND:
            raise
        return None
