"""The log holds one line an event and no token material."""

import io
import json
import logging
import re
from collections.abc import Iterator

import numpy as np
import pytest

from callforest.capture.v1 import staged_call_pb2
from callforest_mesh.chassis.log_lines import LineFormatter, write_log

TOKENS = b"\x4d\x3c\x2b\x1a"


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    output = io.StringIO()
    yield output
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def format_line(style: str, message: object, *args: object) -> str:
    record = logging.LogRecord("callforest", logging.INFO, "f.py", 1, message, args, None)
    return LineFormatter("ledger", style).format(record)


@pytest.mark.parametrize(
    "value",
    [
        TOKENS,
        bytearray(TOKENS),
        memoryview(TOKENS),
        np.frombuffer(TOKENS, "<u4"),
        staged_call_pb2.StagedCall(
            canonical=staged_call_pb2.CanonicalColumns(token_ids=TOKENS, carry_token_count=1)
        ),
        [440_000_000 + i for i in range(17)],
        tuple(440_000_000 + i for i in range(17)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("style", ["json", "text"])
def test_what_could_hold_tokens_is_withheld(style: str, value: object) -> None:
    line = format_line(style, "got %s", value)
    assert re.search(r"got <[\w.]+ of \d+ (bytes|items)>", line)
    assert "4400000" not in line
    assert "M<+" not in line
    assert str(int.from_bytes(TOKENS, "little")) not in line


def test_json_lines_can_be_read(output: io.StringIO) -> None:
    write_log("ledger", style="json", stream=output)
    log = logging.getLogger("callforest")
    log.info("attempt %s\nclosed", "r1")
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("a fault")
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["attempt r1\nclosed", "a fault"]
    assert {line["service"] for line in lines} == {"ledger"}
    assert "ValueError: bad" in lines[1]["fault"]


def test_text_keeps_an_event_on_its_line() -> None:
    assert "\n" not in format_line("text", "a\nb")
    assert format_line("text", "x %d", 3).endswith("ledger: x 3")


def test_long_messages_are_cut() -> None:
    assert len(format_line("json", "x" * 100_000)) < 5000


def test_the_level_is_kept(output: io.StringIO) -> None:
    write_log("ledger", level=logging.WARNING, stream=output)
    logging.getLogger("callforest").info("not this")
    logging.getLogger("callforest").warning("this")
    assert output.getvalue().count("\n") == 1
