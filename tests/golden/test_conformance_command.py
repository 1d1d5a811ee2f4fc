"""The conformance command over recorded cases: exact answers, and exact complaints."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from callforest_mesh.conformance.command import check, evaluate
from callforest_mesh.conformance.json_case import CaseError, read_case, same
from callforest_mesh.conformance.suites import SUITES

CASES = Path(__file__).parent / "data" / "cases"


def cases_of(suite: str) -> list[dict[str, Any]]:
    lines = (CASES / f"{suite}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def answered(suite: str, *lines: str) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    status = evaluate(suite, io.StringIO("".join(line + "\n" for line in lines)), out)
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.requirement("FOR-4")
@pytest.mark.parametrize(("suite", "count"), [("digest", 60), ("verify", 40)])
def test_every_recorded_case_is_answered_as_the_peer_did(suite: str, count: int) -> None:
    out = io.StringIO()
    assert check(suite, CASES / f"{suite}.jsonl", out) == 0
    assert out.getvalue() == f"{count} passed, 0 failed\n"


@pytest.mark.parametrize("suite", ["digest", "verify"])
def test_answers_do_not_look_at_what_is_expected(suite: str) -> None:
    cases = cases_of(suite)
    asked = {"id", "kind", "input", "receipt", "snapshots"}
    blind = [{name: case[name] for name in asked & case.keys()} for case in cases]
    status, answers = answered(suite, *map(json.dumps, blind))
    assert status == 0
    assert [answer["id"] for answer in answers] == [case["id"] for case in cases]
    for case, answer in zip(cases, answers, strict=True):
        assert SUITES[suite].agrees(case, answer["answer"])


def test_a_case_that_is_too_deep_costs_no_other_its_answer(tmp_path: Path) -> None:
    good = cases_of("digest")[:2]
    asked = {"id": "deep", "kind": "call", "input": good[0]["input"] | {"extras": "DEEP"}}
    deep = json.dumps(asked).replace('"DEEP"', '{"a":' * 900 + "1" + "}" * 900)
    lines = [json.dumps(good[0]), deep, json.dumps(good[1])]
    status, answers = answered("digest", *lines)
    assert status == 1
    assert "nested" in answers[1]["answer"]["error"]
    assert [SUITES["digest"].agrees(good[n], answers[2 * n]["answer"]) for n in (0, 1)] == [
        True
    ] * 2
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    out = io.StringIO()
    assert check("digest", file, out) == 1
    assert out.getvalue().endswith("2 passed, 1 failed\n")


@pytest.mark.parametrize("position", [0, 10, 25])
def test_a_wrong_expectation_is_a_failure(position: int, tmp_path: Path) -> None:
    cases = [case for case in cases_of("digest") if case["kind"] == "call"]
    cases[position]["expect"]["digest"] = "0" * 64
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, cases)), encoding="utf-8")
    out = io.StringIO()
    assert check("digest", file, out) == 1
    *failures, last = out.getvalue().splitlines()
    assert len(failures) == 1
    assert cases[position]["id"] in failures[0]
    assert last == f"{len(cases) - 1} passed, 1 failed"


def test_a_row_is_compared_to_the_sign_of_zero(tmp_path: Path) -> None:
    case = next(case for case in cases_of("verify") if case["expect"] == "row")
    case["row"]["logprobs"][0] = -0.0
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(case), encoding="utf-8")
    assert check("verify", file, io.StringIO()) == 1


def test_a_line_that_is_no_case_is_answered_with_an_error() -> None:
    good = json.dumps(cases_of("digest")[0])
    status, answers = answered("digest", "{", good, "[]", '{"id": 1}', '{"id": 2, "x": NaN}')
    assert status == 1
    assert [answer["id"] for answer in answers[:1] + answers[2:]] == [None, None, 1, None]
    assert all("error" in answer["answer"] for answer in answers[:1] + answers[2:])
    assert "digest" in answers[1]["answer"] or "reject" in answers[1]["answer"]


def test_an_empty_file_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text("\n", encoding="utf-8")
    out = io.StringIO()
    assert check("digest", file, out) == 1
    assert out.getvalue() == "0 passed, 0 failed\n"


def test_an_unknown_suite_names_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("astrology", tmp_path / "none", io.StringIO()) == 2
    assert evaluate("astrology", io.StringIO(), io.StringIO()) == 2
    message = capsys.readouterr().err
    assert "astrology" in message
    assert all(name in message for name in SUITES)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1.0, False),
        (1, True, False),
        (0, False, False),
        (0.0, -0.0, False),
        (-0.0, -0.0, True),
        (2**64 - 1, 2**64 - 1, True),
        (2**64 - 1, float(2**64 - 1), False),
        ([1, 2], [1, 2.0], False),
        ({"a": [0.0]}, {"a": [-0.0]}, False),
        ({"a": 1, "b": None}, {"b": None, "a": 1}, True),
        ({"a": None}, {}, False),
        ([1], [1, 1], False),
    ],
)
def test_sameness_is_exact(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal


def test_cases_are_read_exactly() -> None:
    case = read_case('{"id": "x", "a": 18446744073709551615, "b": -0.0, "c": 1.0, "d": 1}')
    assert same(case, {"id": "x", "a": 2**64 - 1, "b": -0.0, "c": 1.0, "d": 1})
    with pytest.raises(CaseError):
        read_case('{"id": "x", "a": Infinity}')
