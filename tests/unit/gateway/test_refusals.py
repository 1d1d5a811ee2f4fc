"""What is refused before generation, and in which shape."""

import json

import grpc
import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_mesh.gateway import refusals
from callforest_mesh.gateway.refusals import HttpRefusal
from callforest_mesh.gateway.unsupported import refuse_unsupported

REFUSED = [
    ("n", 2),
    ("n", 1.0),
    ("n", True),
    ("best_of", 4),
    ("use_beam_search", True),
    ("previous_response_id", "resp_1"),
    ("conversation", "conv_1"),
    ("conversation", {"id": "conv_1"}),
    ("store", True),
    ("continue_final_message", True),
    ("add_generation_prompt", False),
    ("truncate_prompt_tokens", 100),
    ("truncate_prompt_tokens", -1),
    ("truncation", "auto"),
    ("prompt_token_ids", [1]),
    ("required_prefix_token_ids", [1]),
    ("kv_transfer_params", {}),
    ("ec_transfer_params", {}),
    ("vllm_xargs", {"kv_transfer_params": "{}"}),
    ("ng_capture", {}),
    ("echo", True),
    ("return_token_ids", True),
    ("return_tokens_as_token_ids", True),
    ("prompt_logprobs", 0),
    ("logprob_token_ids", [5]),
]
HARMLESS = [
    ("n", 1),
    ("n", None),
    ("store", False),
    ("truncation", "disabled"),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("prompt_token_ids", None),
    ("echo", False),
    ("logprobs", True),
    ("tool_choice", "auto"),
]


def body(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "go"}], **fields}


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_captured_is_refused(name: str, value: object) -> None:
    with pytest.raises(HttpRefusal) as caught:
        refuse_unsupported(body(**{name: value}))
    error = json.loads(caught.value.body())["error"]
    assert caught.value.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unsupported_value"
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_what_asks_for_nothing_passes(name: str, value: object) -> None:
    refuse_unsupported(body(**{name: value}))


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize("content", ["Sure", "", None])
def test_assistant_prefill_is_refused(content: str | None) -> None:
    prefilled = body(messages=[{"role": "user"}, {"role": "assistant", "content": content}])
    with pytest.raises(HttpRefusal, match="prefill"):
        refuse_unsupported(prefilled)


@pytest.mark.requirement("CAP-1")
@pytest.mark.parametrize("name", ["prompt_token_ids", "generation_token_ids", "routed_experts"])
def test_tokens_in_a_message_are_refused(name: str) -> None:
    spoken = {"role": "assistant", "content": "a", name: [1]}
    with pytest.raises(HttpRefusal, match="Tokens are the server's own") as caught:
        refuse_unsupported(body(messages=[{"role": "user"}, spoken, {"role": "user"}]))
    assert caught.value.parameter == f"messages[1].{name}"


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (er.ERROR_REASON_ATTEMPT_NOT_FOUND, 404, "attempt_not_found"),
        (er.ERROR_REASON_ATTEMPT_CLOSED, 422, "attempt_closed"),
        (er.ERROR_REASON_ATTEMPT_SEALED, 422, "attempt_closed"),
        (er.ERROR_REASON_OVERLOADED, 422, "call_refused"),
    ],
)
def test_refused_verdicts(reason: er.ErrorReason.ValueType, status: int, code: str) -> None:
    refused = capture_admission_pb2.Refused(reason=reason, message="open another")
    refusal = refusals.refused_verdict("k", "c", refused)
    assert (refusal.status, refusal.code) == (status, code)


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(
    ("reason", "code", "advice"),
    [
        (er.ERROR_REASON_AMBIGUOUS_HISTORY, "ambiguous_history", "with their ids"),
        (er.ERROR_REASON_HISTORY_CLAIM_REFUSED, "history_claim_refused", "whole history"),
        (er.ERROR_REASON_HISTORY_REQUIRED, "history_required", "whole history"),
        (er.ERROR_REASON_MODE_MISMATCH, "mode_mismatch", "capture mode"),
        (er.ERROR_REASON_CONFIGURATION_CHANGED, "configuration_changed", "another attempt"),
        (er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF, "candidate_without_proof", "paired releases"),
    ],
)
def test_refusals_of_an_attempts_mode_say_what_to_do(
    reason: er.ErrorReason.ValueType, code: str, advice: str
) -> None:
    """As a verdict and as a service's error alike: 422, facts for programs, advice for people."""
    facts = {"candidates": "c1,c2", "capture_key": "k", "call_id": "c"}
    verdict = capture_admission_pb2.Refused(
        reason=reason, message="calls c1 and c2 fit.", metadata={"candidates": "c1,c2"}
    )
    error = refused(reason, metadata=facts)
    error.message = "calls c1 and c2 fit"
    for refusal in (refusals.refused_verdict("k", "c", verdict), refusals.of_service(error)):
        assert (refusal.status, refusal.code, refusal.reason) == (422, code, reason)
        assert refusal.message.startswith("Calls c1 and c2 fit. ")
        assert advice in refusal.message
        assert refusal.message.endswith(" Nothing was generated.")
        assert refusal.facts == facts
        assert refusal.refusal().facts == facts
        assert json.loads(refusal.body())["error"]["type"] == "invalid_request_error"


def away(reason: er.ErrorReason.ValueType = er.ERROR_REASON_PEER_UNAVAILABLE) -> CallforestError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, "10.0.0.7 refused", reason=reason)


def refused(reason: er.ErrorReason.ValueType, **given: object) -> CallforestError:
    return RefusedError(grpc.StatusCode.UNKNOWN, "why", reason=reason, **given)


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "retry_after_s"),
    [
        (away(), 503, "unavailable", "server_error", 1),
        (away(er.ERROR_REASON_ENGINE_UNAVAILABLE), 503, "unavailable", "server_error", 1),
        (refused(er.ERROR_REASON_OVERLOADED, retry_after_ms=1500), 429, "overloaded",
         "rate_limit_error", 2),
        (refused(er.ERROR_REASON_STORE_FULL), 503, "unavailable", "server_error", 30),
        (refused(er.ERROR_REASON_REQUEST_REFUSED, metadata={"parameter": "messages"}), 400,
         "invalid_request_error", "invalid_request_error", None),
        (refused(er.ERROR_REASON_INTERNAL, metadata={"incident_id": "5eed"}), 500,
         "internal_error", "server_error", None),
    ],
)  # fmt: skip
def test_errors_of_services(
    error: CallforestError, status: int, code: str, kind: str, retry_after_s: int | None
) -> None:
    refusal = refusals.of_service(error)
    shown = json.loads(refusal.body())["error"]
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (status, code, retry_after_s)
    assert (shown["type"], shown["code"]) == (kind, code)
    assert "10.0.0.7" not in shown["message"]


def test_incident_is_named_and_its_text_is_not() -> None:
    refusal = refusals.of_service(
        refused(er.ERROR_REASON_INTERNAL, metadata={"incident_id": "5eed"})
    )
    assert "5eed" in refusal.message
    assert "why" not in refusal.message
