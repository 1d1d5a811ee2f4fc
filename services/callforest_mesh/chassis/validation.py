"""Every inbound message is held against the rules of its schema, once."""

from __future__ import annotations

from typing import cast

import protovalidate
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.plain_rules import Holds, plain_check

_VALIDATOR = protovalidate.Validator()
_PLAIN: dict[type[Message], Holds | None] = {}


def check(message: Message) -> None:
    """Hold a message against its schema.

    Raises:
        Refusal: INVALID_MESSAGE, with a violation for each field at fault.
    """
    if _is_plain(message):
        return
    found = _VALIDATOR.collect_violations(message)
    if not found:
        return
    violations = [(_path(violation), violation.proto.message) for violation in found]
    summary = "; ".join(f"{path}: {text}" for path, text in violations[:4])
    raise malformed(type(message).DESCRIPTOR.full_name, summary, violations)


def _is_plain(message: Message) -> bool:
    kind = type(message)
    try:
        holds = _PLAIN[kind]
    except KeyError:
        holds = _PLAIN[kind] = plain_check(cast("Descriptor", kind.DESCRIPTOR))
    return holds is not None and holds(message)


def malformed(
    message_name: str, summary: str, violations: list[tuple[str, str]] | None = None
) -> Refusal:
    """Make the refusal of a malformed message."""
    return Refusal(
        er.ERROR_REASON_INVALID_MESSAGE,
        f"{message_name}: {summary}",
        violations=violations or (),
        message_name=message_name,
    )


def _path(violation: protovalidate.Violation) -> str:
    field = violation.proto.field
    if field is None:
        return ""
    parts = []
    for element in field.elements:
        index = element.subscript
        parts.append(element.field_name + (f"[{index.value}]" if index is not None else ""))
    return ".".join(parts)
