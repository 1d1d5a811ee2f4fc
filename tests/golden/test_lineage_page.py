"""The vectors printed in docs/lineage.md are the code's, so that others can trust the page."""

import json
import re
from pathlib import Path

import pytest

from callforest_core.lineage.canonical_json import canonical_arguments
from callforest_core.lineage.fingerprint import (
    ConversationScan,
    assistant_fingerprint,
    conversation_digest,
)
from callforest_core.lineage.replay import EMPTY_SOURCE_DIGEST, render_digest, source_digests

PAGE = Path(__file__).resolve().parents[2] / "docs/lineage.md"


@pytest.mark.requirement("ADM-1")
def test_the_page_prints_what_the_code_gives() -> None:
    vectors = PAGE.read_text("utf-8").partition("## 10. Vectors")[2]
    [block] = re.findall(r"```json\n(.*?)```", vectors, re.DOTALL)
    items = json.loads(block)
    printed = re.findall(r"^\| .+ \| `(.+)` \|$", vectors, re.MULTILINE)
    answered = ConversationScan(items).continued([{"role": "assistant", "content": "Bye"}])
    digests = [
        assistant_fingerprint(items),
        *(conversation_digest(items[:count]) for count in range(4)),
        answered.fingerprint,
        answered.output_fingerprint,
        EMPTY_SOURCE_DIGEST,
        source_digests(items)[-1],
        render_digest({}),
    ]
    arguments = items[1]["tool_calls"][0]["function"]["arguments"]
    assert printed == [canonical_arguments(arguments), *(one.hex() for one in digests)]
