"""The conformance suites by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from callforest_mesh.conformance import expectation
from callforest_mesh.conformance.json_case import Case, CaseError, Json


class UnknownSuiteError(ValueError):
    """There is no suite of this name."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite: how its cases are answered and when an answer is right.

    Attributes:
        module: dotted name of the module whose `answer(case)` answers; imported at first use, so
            that no suite costs another anything.
        agrees: `agrees(case, answer)` says whether the answer is what the case expects.
    """

    module: str
    agrees: Callable[[Case, Json], bool]

    def answer(self, case: Case) -> Json:
        """Answer one case, ignoring what it expects.

        Raises:
            CaseError: it is not a case of this suite.
        """
        module = importlib.import_module(self.module)
        try:
            answered: Json = module.answer(case)
        except (KeyError, TypeError, ValueError) as error:
            raise CaseError(f"not a case of this suite: {error!r}") from error
        return answered


SUITES: Final[dict[str, Suite]] = {
    name: Suite(f"{__package__}.{name}_suite", rule)
    for name, rule in (
        ("digest", expectation.digests),
        ("fingerprint", expectation.fingerprints),
        ("lineage", expectation.lineage),
        ("terminal", expectation.equals),
        ("verify", expectation.verification),
        ("forest", expectation.equals),
        ("padding", expectation.equals),
    )
}


def suite_named(name: str) -> Suite:
    """Return the suite of this name.

    Raises:
        UnknownSuiteError: there is none; says which there are.
    """
    if name not in SUITES:
        raise UnknownSuiteError(f"no suite {name!r}; there are {', '.join(sorted(SUITES))}")
    return SUITES[name]
