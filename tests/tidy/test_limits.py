"""P8, bounded: what a service can reach is exported under the word that its refusals use."""

import ast
from collections.abc import Iterator

from tests.tidy.sources import own_files, text_of

OF_THE_CALLER = {"answer_ms"}
"""Not a bound of the service: the time that the call itself has."""
EXPORTED_BY_LOOPS = {
    *("calls_in_work", "measured_calls", "waiters_of_a_call"),
    *("store_read_s", "store_snapshot_s"),
}
"""Their names stand beside the call of `limit`, not in it; a test of the metrics sees them."""


def first_arguments(function: str) -> Iterator[str]:
    """Give the names that calls of a function begin with, in the services."""
    for path in own_files():
        if path.suffix != ".py" or "services" not in path.parts:
            continue
        for node in ast.walk(ast.parse(text_of(path) or "")):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            first = node.args[0]
            if called == function and isinstance(first, ast.Constant):
                yield first.value


def test_every_bound_that_refusals_name_is_exported() -> None:
    named = set(first_arguments("overloaded")) - OF_THE_CALLER
    assert len(named) >= 10
    assert named == set(first_arguments("limit")) | EXPORTED_BY_LOOPS
