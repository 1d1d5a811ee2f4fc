"""What every test session has: the record of the requirements that it proved."""

import json
from pathlib import Path

import pytest

# From best to worst: a test with many cases is as good as its worst case.
OUTCOMES = ("passed", "skipped", "failed")


class RequirementReport:
    """Collects what became of each test that proves a requirement, by `path::name`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marked: set[str] = set()
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.marked = {
            item.nodeid for item in items if item.get_closest_marker("requirement") is not None
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A pass counts once the body has run; a failure or a skip counts in any phase.
        if report.nodeid not in self.marked or (report.passed and report.when != "call"):
            return
        test = report.nodeid.partition("[")[0]
        known = self.outcomes.get(test, OUTCOMES[0])
        self.outcomes[test] = max(known, report.outcome, key=OUTCOMES.index)

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.outcomes, indent=2, sort_keys=True), "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--requirement-report",
        type=Path,
        metavar="FILE",
        help="write what became of each test that proves a requirement",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--requirement-report")
    if path is not None:
        config.pluginmanager.register(RequirementReport(path), "requirement-report")
