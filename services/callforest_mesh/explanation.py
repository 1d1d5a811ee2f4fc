"""Why a call is what it is: how it was admitted, placed, recorded and selected (OPS-4)."""

from __future__ import annotations

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2, receipt_pb2
from callforest.ledger.v1 import ledger_service_pb2 as pb

_ROOTS = {
    capture_admission_pb2.ROOT_REASON_UNSPECIFIED: "it continues nothing (chain mode)",
    capture_admission_pb2.ROOT_REASON_NO_MODEL_ITEMS: "the request holds nothing a model wrote",
    capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED: (
        "no call of the attempt ends with the request's last answer"
    ),
    capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED: (
        "the call with that history was rendered with other options"
    ),
    capture_admission_pb2.ROOT_REASON_NOT_OBSERVATIONS: (
        "more than user messages and tool results follows the last answer"
    ),
    capture_admission_pb2.ROOT_REASON_UNREADABLE_ITEM: "an item has no normal form",
}
_MATCHES = {
    capture_admission_pb2.HISTORY_MATCH_UNSPECIFIED: "found by what models wrote",
    capture_admission_pb2.HISTORY_MATCH_EXACT: "the history is equal",
    capture_admission_pb2.HISTORY_MATCH_TOOL_CONTENT_EQUIVALENT: (
        "the history is equal but for how missing text is spelt"
    ),
}
_INPUTS = {
    capture_admission_pb2.CAPTURE_INPUT_ROOT: "the rendering as it is",
    capture_admission_pb2.CAPTURE_INPUT_SPLICED: "captured tokens, then the rest of the rendering",
}


def explain(name: str, call: pb.GetCallResponse, receipt: receipt_pb2.Receipt | None) -> list[str]:
    """Describe one call; give the lines.

    Args:
        name: the call's staging key.
        call: all that the ledger has of it.
        receipt: of the rollout, when it was finalized.
    """
    lines = [f"call {name}", f"  admitted: {_admitted(call)}"]
    if call.HasField("record"):
        lines += _record_lines(call.record)
    elif not call.failures and not call.HasField("withdrawal"):
        lines.append("  pending: neither a record nor a failure is durable")
    if call.HasField("withdrawal"):
        withdrawal = call.withdrawal
        lines.append(f"  withdrawn: {withdrawal.reason} {withdrawal.detail}".rstrip())
    for failure in call.failures:
        cause = f"/{failure.worker_reason}" if failure.worker_reason else ""
        lines.append(f"  failed: {failure.reason}{cause} {failure.detail}".rstrip())
    return lines + _receipt_lines(name.rpartition("/")[2], call, receipt)


def _admitted(call: pb.GetCallResponse) -> str:
    owner = call.record.source_capture_key
    if not owner:
        return _verdict(call.verdict)
    return f"restored from {owner}; how it was admitted stands with {owner}/" + (
        call.record.coords.call_id
    )


def _verdict(verdict: capture_admission_pb2.Verdict) -> str:
    match verdict.WhichOneof("verdict"):
        case "root":
            root = verdict.root
            shared = (
                f"; {root.shared_atom_count} atoms are those of {root.nearest_call_id}"
                if root.nearest_call_id
                else ""
            )
            return f"root, for {_ROOTS.get(root.reason, 'a reason of a newer release')}{shared}"
        case "continuation":
            parent = verdict.continuation
            match_name = _MATCHES.get(parent.match, "in a sense of a newer release")
            return f"continuation of {parent.parent_call_id}: {match_name}"
        case "uncaptured":
            return f"uncaptured: {verdict.uncaptured.reason} {verdict.uncaptured.detail}".rstrip()
        case _:
            return "in a way of a newer release"


def _record_lines(record: call_record_pb2.CallRecord) -> list[str]:
    lines = []
    if record.HasField("difference"):
        lines.append(f"  differs: {_difference(record.difference)}")
    if record.HasField("decision"):
        lines.append(f"  engine input: {_decision(record.decision)}")
    coords, completion = record.coords, record.completion
    carried = coords.delta_token_count - completion.generation_token_count
    lines.append(
        f"  recorded: {coords.prev_token_count} inherited, {carried} carried, "
        f"{completion.generation_token_count} generated, weights {coords.weight_version}, "
        f"{completion.finish_reason or 'unknown end'}"
    )
    return lines


def _difference(difference: call_record_pb2.HistoryDifference) -> str:
    name = call_record_pb2.DifferenceClass.Name(difference.kind)
    what = name.removeprefix("DIFFERENCE_CLASS_").lower()
    against = f" against {difference.against_call_id}" if difference.against_call_id else ""
    detail = f": {difference.detail}" if difference.detail else ""
    return f"{what} at atom {difference.atom_index}{against}{detail}"


def _decision(decision: capture_admission_pb2.CaptureDecision) -> str:
    text = _INPUTS.get(decision.input, "in a way of a newer release")
    if decision.input == capture_admission_pb2.CAPTURE_INPUT_SPLICED:
        text += f" ({decision.prefix_cut} tokens, then from token {decision.render_cut})"
    if decision.reason:
        text += f", a fresh root: {decision.reason}"
    return "; ".join([text, *decision.notes])


def _receipt_lines(
    call_id: str, call: pb.GetCallResponse, receipt: receipt_pb2.Receipt | None
) -> list[str]:
    if receipt is None:
        return ["  selection: the rollout is not finalized"]
    found = next((one for one in receipt.calls if one.call_id == call_id), None)
    if found is None:
        return [f"  selection: out, {_unrecorded(call)}"]
    verdict = "in" if found.selected else "out"
    reason = f", {found.reason}" if found.reason else ""
    lines = [f"  selection: {verdict}{reason}"]
    if receipt.masked:
        lines.append(f"  rollout masked: {receipt.mask_reason} {receipt.mask_detail}".rstrip())
    return lines


def _unrecorded(call: pb.GetCallResponse) -> str:
    """Say why a receipt does not name a call: it names those whose tokens can be verified."""
    if call.failures:
        return "its capture failed: no tokens of it can be verified"
    if call.HasField("withdrawal"):
        return "it was withdrawn: nothing was generated"
    return "it was pending when the attempt was sealed"
