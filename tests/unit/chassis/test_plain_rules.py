"""What plainly keeps its rules is valid for protovalidate too, and valid items are plain."""

import random
from collections.abc import Callable

import protovalidate
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from callforest.ledger.v1 import ledger_service_pb2
from callforest_client import streams
from callforest_client.stream_spec import StreamSpec
from callforest_mesh.chassis.plain_rules import plain_check

SPECS = [one for one in vars(streams).values() if isinstance(one, StreamSpec)]
VALIDATOR = protovalidate.Validator()
WORDS = ("a", "A-z_0.~", "a" * 64, "a" * 65, "a" * 128, "a" * 129, "", "a\n", "\u00e9", "a b")
SIZES = (32, 32, 32, 4, 8, 0, 1, 31, 33, 64, 65)
NUMBERS = (1, 0, 2, 7, 255, 3_600_000, 3_600_001, 2**32 - 1)


def value_of(field: FieldDescriptor, chance: random.Random) -> object:
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(WORDS[:2]) if chance.random() < 0.9 else chance.choice(WORDS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(32 if chance.random() < 0.8 else chance.choice(SIZES))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return chance.choice((1, 1, 1, 2, 0, 9))
    if field.type == FieldDescriptor.TYPE_UINT64 and chance.random() < 0.1:
        return chance.choice((2**32, 2**64 - 1))
    if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64):
        return chance.randint(0, 9)
    return 1 if chance.random() < 0.5 else chance.choice(NUMBERS)


def fill(message: Message, chance: random.Random) -> None:
    """Fill a message at random, mostly as its rules want it."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.06:
            continue
        if field.is_repeated:
            into = getattr(message, field.name)
            for _ in range(chance.choice((0, 1, 2, 64, 65))):
                if field.message_type is None:
                    into.append(value_of(field, chance))
                else:
                    fill(into.add(), chance)
        elif field.message_type is None:
            setattr(message, field.name, value_of(field, chance))
        else:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), chance)
    agree(message, chance)


def agree(message: Message, chance: random.Random) -> None:
    """Make lengths and links agree, as whole messages want them, or leave them as they are."""
    if chance.random() < 0.1:
        return
    names = {field.name for field in message.DESCRIPTOR.fields}
    if {"carry_token_count", "logprobs"} <= names:
        message.logprobs = bytes(8)
        message.token_ids = bytes(4 * (message.carry_token_count % 64) + 8)
        message.carry_token_count %= 64
    if "context_digests" in names:
        message.item_count %= 64
        message.context_digests = bytes(32 * (message.item_count + 1))
    if {"parent_call_id", "prev_token_count"} <= names and chance.random() < 0.9:
        message.prev_token_count %= 2
        if not message.prev_token_count:
            message.ClearField("parent_call_id")
        elif not message.parent_call_id:
            message.parent_call_id = "p"


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_plain_items_are_the_valid_ones(spec: StreamSpec) -> None:
    make: Callable[[], Message] = spec.item
    holds = plain_check(make.DESCRIPTOR)
    assert holds is not None
    chance = random.Random(spec.name)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        item = make()
        fill(item, chance)
        valid = not VALIDATOR.collect_violations(item)
        assert holds(item) == valid, item
        seen[valid] += 1
    assert min(seen.values()) > 20, seen


def test_a_rule_that_is_not_known_is_left_to_protovalidate() -> None:
    unknown = [
        message
        for message in ledger_service_pb2.DESCRIPTOR.message_types_by_name.values()
        if plain_check(message) is None
    ]
    assert unknown, "requests have rules of more kinds than items"
