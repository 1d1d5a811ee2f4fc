"""The fuzz test's own eyes: what it must see as a fault, and that its seeds are right."""

import random

import grpc
import pytest
from google.rpc import status_pb2

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import status_of
from callforest_core.refusal import Refusal
from tests.robustness.fuzz_http import Request, fault_of_answer, routes
from tests.robustness.fuzz_rpc import fault_of_status, methods
from tests.robustness.fuzz_seeds import Seeds
from tests.robustness.mutation import WRONG_VALUES, MessageMutation, wrong_at_every_key

METHODS = methods()


def test_every_rpc_and_route_is_found() -> None:
    assert len({method.service for method in METHODS}) == 10
    assert {"AdmitCalls", "SubscribeRows", "Complete", "RunEngine", "TrainStep"} <= {
        method.descriptor.name for method in METHODS
    }
    assert len(routes()) == len({(route.method, route.path) for route in routes()}) >= 8


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_seeds_keep_the_rules_and_mutations_break_them(method) -> None:
    chance = random.Random(1)
    seeds = Seeds(chance, {}, {})
    mutation = MessageMutation(chance, seeds)
    wrong = 0
    for _ in range(40):
        message = seeds.message(method.descriptor.input_type)
        before = message.SerializeToString(deterministic=True)
        mutation.fields(message)
        wrong += message.SerializeToString(deterministic=True) != before
    assert wrong > 20 or not method.descriptor.input_type.fields


def test_a_seed_gives_the_same_messages() -> None:
    made = [
        [Seeds(random.Random(5), {}, {}).message(one.descriptor.input_type) for one in METHODS]
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_typed_errors_are_no_fault() -> None:
    refusal = Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "no call c1", capture_key="r", call_id="c1")
    assert fault_of_status(status_of(refusal)) == ("CALL_NOT_FOUND", None)


@pytest.mark.parametrize(
    ("status", "seen"),
    [
        (status_pb2.Status(code=13, message="x"), "without ErrorInfo"),
        (status_pb2.Status(code=2), "without ErrorInfo"),
        (status_of(Refusal(er.ERROR_REASON_INTERNAL, "a fault", incident_id="1")), "a fault of"),
        (status_of(Refusal(er.ERROR_REASON_PEER_UNAVAILABLE, "away", peer="x")), "an outage"),
        (
            status_of(Refusal(er.ERROR_REASON_INVALID_MESSAGE, "KeyError: 3", message_name="m")),
            "exception text",
        ),
    ],
)
def test_untyped_errors_are_seen(status: status_pb2.Status, seen: str) -> None:
    assert seen in str(fault_of_status(status)[1])


def test_a_reason_with_another_code_is_seen() -> None:
    status = status_of(Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "no call", call_id="c"))
    status.code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "came as" in str(fault_of_status(status)[1])
    status = status_of(Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "no call", call_id="c"))
    status.details[0].value = status.details[0].value.replace(b"CALL", b"CALF")
    assert "unknown reason" in str(fault_of_status(status)[1])


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (b"", "no answer"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}", "makes 500"),
        (b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{}", "without a form"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 1\r\n\r\n{", "no JSON"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 20\r\n\r\nTraceback", "no HTTP answer"),
        (b"HTTP/1.1 404 X\r\nContent-Length: 9\r\n\r\nTraceback", "exception text"),
        (b"HTTP/1.1 503 X\r\nContent-Length: 2\r\n\r\n{}", "makes 503"),
    ],
)
def test_untyped_answers_are_seen(answer: bytes, seen: str) -> None:
    assert seen in str(fault_of_answer(answer, Request(b"GET / HTTP/1.1\r\n\r\n"))[1])


def test_every_key_is_wrong_in_every_way() -> None:
    bodies = list(wrong_at_every_key({"a": [{"b": 1}]}))
    assert len(bodies) == 3 * (len(WRONG_VALUES) + 1)
