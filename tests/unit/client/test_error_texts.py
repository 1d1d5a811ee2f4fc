"""What an error repeats of its caller travels, whatever the caller sent."""

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import error_of, status_of, status_of_error
from callforest_core.refusal import Refusal

HALF = "\ud800"
"""Half a surrogate pair: JSON can say it, and it has no UTF-8 form."""


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize("text", [f"no {HALF} here", f"no {HALF}" + "x" * 10_000])
def test_what_has_no_utf_8_form_is_said_without_it(text: str) -> None:
    refusal = Refusal(
        er.ERROR_REASON_REQUEST_REFUSED, text, violations=[(text, text)], parameter=text
    )
    error = error_of(status_of(refusal))
    assert error.reason == er.ERROR_REASON_REQUEST_REFUSED
    assert error.message.startswith("no ?")
    assert error.metadata["parameter"].startswith("no ?")
    assert error_of(status_of_error(error)).message == error.message
