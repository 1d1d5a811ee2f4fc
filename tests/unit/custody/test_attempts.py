"""Capture keys: a rollout's id, and the number of the attempt behind it."""

import pytest

from callforest_core.custody.attempts import AttemptName, attempt_name, is_earlier_attempt

pytestmark = pytest.mark.requirement("ADM-9")


@pytest.mark.parametrize(
    ("name", "capture_key"),
    [
        (AttemptName("r1", 0), "r1"),
        (AttemptName("r1", 1), "r1-a1"),
        (AttemptName("r1", 10), "r1-a10"),
        (AttemptName("run-a3x", 2), "run-a3x-a2"),
        (AttemptName("-a", 1), "-a-a1"),
    ],
)
def test_reading_is_the_inverse_of_naming(name: AttemptName, capture_key: str) -> None:
    assert name.capture_key == capture_key
    assert attempt_name(capture_key) == name


def test_a_number_that_no_attempt_has_is_a_part_of_the_rollout() -> None:
    for capture_key in ("r-a0", "r-a01", "r-a1 ", "-a1", "r-a1\n"):
        assert attempt_name(capture_key) == AttemptName(capture_key, 0)


def test_the_earlier_attempts_are_named_first_to_last() -> None:
    assert AttemptName("r1", 0).earlier == []
    assert AttemptName("r1", 3).earlier == ["r1", "r1-a1", "r1-a2"]


def test_only_lower_numbers_of_the_same_rollout_are_earlier() -> None:
    assert is_earlier_attempt("r1", "r1-a1")
    assert is_earlier_attempt("r1-a9", "r1-a10")
    for earlier, capture_key in (
        ("r1", "r1"),
        ("r1-a1", "r1-a1"),
        ("r1-a10", "r1-a9"),
        ("r1-a1", "r1"),
        ("r2", "r1-a1"),
        ("", "r1-a1"),
    ):
        assert not is_earlier_attempt(earlier, capture_key)
