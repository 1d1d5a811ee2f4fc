"""The log: one line an event on standard error, as JSON or for people, without token material.

What could hold tokens (bytes, arrays, messages, long sequences) is replaced by its kind and size
before it is formatted, so that no call of a logger can leak it by mistake.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

import numpy as np
from google.protobuf.message import Message

LogFormat: TypeAlias = Literal["json", "text"]

_MESSAGE_CHARACTERS = 4096
_TRACE_CHARACTERS = 16_384
_SEQUENCE_ITEMS = 16


class LineFormatter(logging.Formatter):
    """Writes a record as one line.

    Args:
        service: names the process in each line.
        style: "json" has one object a line; "text" is for people, its faults span lines.
    """

    def __init__(self, service: str, style: LogFormat) -> None:
        super().__init__()
        self._service = service
        self._layout = style

    def format(self, record: logging.LogRecord) -> str:
        """Give the line, without its end."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = _cut(_message_of(record), _MESSAGE_CHARACTERS)
        fault = self.formatException(record.exc_info) if record.exc_info else ""
        fault = _cut(fault, _TRACE_CHARACTERS)
        level = record.levelname.lower()
        if self._layout == "json":
            line = {
                "time": when,
                "level": level,
                "service": self._service,
                "logger": record.name,
                "message": message,
            }
            return json.dumps(line | ({"fault": fault} if fault else {}), ensure_ascii=False)
        flat = message.replace("\n", "\\n")
        return f"{when} {level:<7} {self._service}: {flat}" + (f"\n{fault}" if fault else "")


def write_log(
    service: str,
    *,
    style: LogFormat = "text",
    level: int = logging.INFO,
    stream: TextIO | None = None,
) -> None:
    """Send the process's log to standard error; what was set up before is replaced."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(service, style))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)


def _message_of(record: logging.LogRecord) -> str:
    if not record.args:
        return str(record.msg)
    if isinstance(record.args, Mapping):
        return str(record.msg) % {key: _shown(value) for key, value in record.args.items()}
    return str(record.msg) % tuple(_shown(value) for value in record.args)


def _shown(value: object) -> object:
    """Replace what could hold token material."""
    if isinstance(value, (bytes, bytearray, memoryview, np.ndarray)):
        size = value.nbytes if isinstance(value, (memoryview, np.ndarray)) else len(value)
        return f"<{type(value).__name__} of {size} bytes>"
    if isinstance(value, Message):
        return f"<{value.DESCRIPTOR.full_name} of {value.ByteSize()} bytes>"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > _SEQUENCE_ITEMS:
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}... ({len(text)} characters)"
