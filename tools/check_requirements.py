"""Check that every test named in `docs/requirements.md` ran and passed.

Usage: python -m tools.check_requirements REPORT, where REPORT is what
`pytest --requirement-report` wrote. A proof that was skipped, deselected or renamed is no proof.
"""

import json
import re
import sys
from pathlib import Path

from tools.requirement_table import TABLE

ROW = re.compile(r"^\| (?P<id>[A-Z]+-\d+) \|.*\| (?P<proof>.*) \|$", re.MULTILINE)


def complaints(page: str, outcomes: dict[str, str]) -> list[str]:
    """Return one line for each named test that did not pass.

    Args:
        page: The text of the table.
        outcomes: What became of each marked test, by `path::name`.
    """
    return [
        f"{row['id']}: {test} {outcomes.get(test, 'did not run')}"
        for row in ROW.finditer(page)
        for test in re.findall(r"`([^`]+)`", row["proof"])
        if outcomes.get(test) != "passed"
    ]


def main() -> int:
    """Print the complaints and return the exit status."""
    outcomes = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    page = TABLE.read_text("utf-8")
    found = complaints(page, outcomes)
    rows = list(ROW.finditer(page))
    proven = sum(row["proof"] != "planned" for row in rows)
    print("\n".join([*found, f"requirements: {proven} of {len(rows)} have tests"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
