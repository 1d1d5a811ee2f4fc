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
from callforest_core.lineage.source import (
    EMPTY_HISTORY,
    output_summary,
    source_render_digest,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/lineage.md"


@pytest.mark.requirement("ADM-1", "ADM-2")
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
        *_source_digests(items),
    ]
    arguments = items[1]["tool_calls"][0]["function"]["arguments"]
    assert printed == [canonical_arguments(arguments), *(one.hex() for one in digests)]


def _source_digests(items: list[dict[str, object]]) -> list[bytes]:
    """Give the digests of section 11 in the page's order."""
    history = EMPTY_HISTORY.extended(items)
    begun = EMPTY_HISTORY.extended([items[0], {"role": "assistant", "content": "Ok"}])
    nulled = EMPTY_HISTORY.extended([items[0], {**items[1], "content": None}, items[2]])
    return [
        EMPTY_HISTORY.source_digest,
        EMPTY_HISTORY.tool_content_digest,
        begun.source_digest,
        history.boundaries[0].source_digest,
        history.source_digest,
        nulled.source_digest,
        nulled.tool_content_digest,
        output_summary([items[1]]).digest,
        source_render_digest({}),
    ]
