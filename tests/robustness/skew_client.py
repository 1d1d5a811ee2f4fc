"""A harness, a rollout owner and a trainer of the last release: its stubs, and nothing of today's.

Usage: env PYTHONPATH=STUBS python skew_client.py ADDRESSES, a JSON map by service. It plays a
rollout of three calls to its consumed group, and prints what it saw.
"""

from __future__ import annotations

import json
import sys
import uuid

import grpc

from callforest.admission.v1 import admission_service_pb2 as admission_pb
from callforest.admission.v1 import admission_service_pb2_grpc as admission_rpc
from callforest.capture.v1 import item_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as finalizer_pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as finalizer_rpc
from callforest.gateway.v1 import gateway_service_pb2 as gateway_pb
from callforest.gateway.v1 import gateway_service_pb2_grpc as gateway_rpc
from callforest.ledger.v1 import ledger_service_pb2 as ledger_pb
from callforest.ledger.v1 import ledger_service_pb2_grpc as ledger_rpc
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.staging.v1 import staging_service_pb2_grpc as staging_rpc

TENANT = "default"
WAIT_S = 60.0
TURNS = 3


def main() -> None:
    addresses = json.loads(sys.argv[1])
    channels = {name: grpc.insecure_channel(address) for name, address in addresses.items()}
    admission = admission_rpc.AdmissionServiceStub(channels["admission"])
    opened = admission.OpenAttempt(
        admission_pb.OpenAttemptRequest(
            tenant=TENANT, rollout_id="old", request_id=str(uuid.uuid4())
        ),
        timeout=WAIT_S,
    )
    key = opened.attempt.capture_key
    served = play(gateway_rpc.GatewayServiceStub(channels["gateway"]), key)
    admission.CloseAttempt(
        admission_pb.CloseAttemptRequest(tenant=TENANT, capture_key=key), timeout=WAIT_S
    )
    sealed = seal(ledger_rpc.LedgerServiceStub(channels["ledger"]), key)
    found = fetch(staging_rpc.StagingServiceStub(channels["staging"]), key, served)
    finalizer = finalizer_rpc.FinalizerServiceStub(channels["finalizer"])
    seen = {
        "module": gateway_pb.__file__,
        "calls": [one.call_id for one in served],
        "staged": found,
    }
    print(json.dumps(seen | finish(finalizer, key, sealed, served[-1])))


def play(gateway, key: str) -> list:
    """Make the calls of a conversation, each as one item of a stream."""
    messages, served = [{"role": "user", "content": "begin"}], []
    for turn in range(TURNS):
        body = json.dumps({"model": "scripted", "messages": messages, "seed": turn}).encode()
        call = gateway_pb.CompletionCall(
            capture_key=key, api=gateway_pb.COMPLETION_API_CHAT, request=body
        )
        context = item_pb2.ItemContext(sequence=turn + 1, tenant=TENANT, timeout_ms=60_000)
        item = gateway_pb.CompleteItem(context=context, call=call)
        answers = gateway.Complete(iter([gateway_pb.CompleteRequest(items=[item])]), timeout=WAIT_S)
        results = [result for answer in answers for result in answer.results]
        assert len(results) == 1, results
        assert results[0].WhichOneof("outcome") == "completion", results
        served.append(results[0].completion)
        answer = json.loads(served[-1].response)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"on {turn}"}]
    return served


def seal(ledger, key: str):
    """Wait for the calls, and seal their attempt."""
    ledger.AwaitSettled(
        ledger_pb.AwaitSettledRequest(tenant=TENANT, capture_key=key, wait_ms=30_000),
        timeout=WAIT_S,
    )
    sealed = ledger.SealAttempt(
        ledger_pb.SealAttemptRequest(tenant=TENANT, capture_key=key), timeout=WAIT_S
    )
    return sealed.attempt


def fetch(staging, key: str, served: list) -> list[str]:
    """Name the calls that are staged, as served."""
    request = staging_pb.FetchRequest(
        tenant=TENANT, capture_key=key, call_ids=[one.call_id for one in served]
    )
    calls = [part.call for part in staging.Fetch(request, timeout=WAIT_S)]
    return [
        call.call_id
        for call, one in zip(calls, served, strict=True)
        if call.served_response == one.response
    ]


def finish(finalizer, key: str, sealed, last) -> dict[str, object]:
    """Finalize the rollout, publish its group of one, and consume it."""
    receipt = finalizer.FinalizeRollout(
        finalizer_pb.FinalizeRolloutRequest(
            tenant=TENANT,
            group_id="old-group",
            rollout_id="old",
            slot=0,
            capture_key=key,
            epoch=sealed.epoch,
            revision=sealed.revision,
            reward=1.0,
            declared_response_id=json.loads(last.response)["id"],
        ),
        timeout=WAIT_S,
    ).receipt
    finalizer.FinalizeGroup(
        finalizer_pb.FinalizeGroupRequest(tenant=TENANT, group_id="old-group", rollout_count=1),
        timeout=WAIT_S,
    )
    log = finalizer.GetRowLog(finalizer_pb.GetRowLogRequest(tenant=TENANT), timeout=WAIT_S)
    start = finalizer_pb.StartSubscription(
        tenant=TENANT, consumer="old-trainer", after_cursor=log.head_cursor - 1
    )
    asked = [
        finalizer_pb.SubscribeRowsRequest(start=start),
        finalizer_pb.SubscribeRowsRequest(credit=finalizer_pb.RowCredit(groups=1)),
    ]
    batch = next(finalizer.SubscribeRows(iter(asked), timeout=WAIT_S)).batch
    return {
        "masked": receipt.mask_reason,
        "rows": len(batch.rows),
        "group": batch.group_id,
    }


if __name__ == "__main__":
    main()
