"""What a case expects, and when an answer is that."""

from __future__ import annotations

from callforest_mesh.conformance.json_case import Case, CaseError, Json, member, same


def equals(case: Case, answered: Json) -> bool:
    """The answer equals `expect`."""
    return same(member(case, "expect"), answered)


def digests(case: Case, answered: Json) -> bool:
    """Equality; where a reject is expected any reason is right."""
    expected = member(case, "expect")
    if expected == "reject" or (isinstance(expected, dict) and expected.keys() == {"reject"}):
        return isinstance(answered, dict) and answered.keys() == {"reject"}
    return same(expected, answered)


def fingerprints(case: Case, answered: Json) -> bool:
    """Equality of each fingerprint; where an error is expected any reason is right."""
    expected = member(case, "expect")
    if not isinstance(expected, dict) or not isinstance(answered, dict):
        return False
    return expected.keys() == answered.keys() and all(
        same(wanted, answered[name]) or (_is_error(wanted) and _is_error(answered[name]))
        for name, wanted in expected.items()
    )


def _is_error(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() == {"error"}


def lineage(case: Case, answered: Json) -> bool:
    """Equality with the expectations of the operations, the ledger and the queries together."""
    if "expect" in case:
        return equals(case, answered)
    expected: Json = {
        "ops": _each(case, "ops"),
        "has_rows": member(case, "has_rows"),
        "manifest": member(case, "manifest"),
        "queries": _each(case, "queries"),
    }
    return same(expected, answered)


def _each(case: Case, name: str) -> list[Json]:
    holders = member(case, name)
    if not isinstance(holders, list):
        raise CaseError(f"{name} are a list")
    return [member(holder, "expect") for holder in holders if isinstance(holder, dict)]


def verification(case: Case, answered: Json) -> bool:
    """The outcome decides; for a parse reject the verifier's code is right too."""
    outcome = member(case, "expect")
    expected: dict[str, Json] = dict(outcome) if isinstance(outcome, dict) else {"expect": outcome}
    kind = expected.get("expect")
    for word, beside in (("row", "row"), ("error", "code")):
        if kind == word and beside not in expected:
            expected[beside] = member(case, beside)
    if same(expected, answered):
        return True
    if kind != "parse_reject" or "verifier_code" not in case:
        return False
    return same({"expect": "error", "code": case["verifier_code"]}, answered)
