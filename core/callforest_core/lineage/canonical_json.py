"""The canonical JSON text that fingerprints hash (contract 3.3).

The form is orjson's from 3.11.7 on with sorted keys. It is pinned here, not taken from whatever
writer is installed: two processes with different float styles would silently stop matching.

Values are parsed JSON: None, bool, int, float, str, list and dict with str keys. The standard
library's writer agrees on everything but four points, and each leaves a trace in its text that a
few scans find; only then does the slower, exact writer run:

* floats from 1e-5 up to 1e-4 are written out (`0.000015`), and exponents have no leading zero;
* NaN and infinities become `null`;
* integers outside [-2^63, 2^64-1] are an error;
* more than 254 containers inside one another are an error.
"""

import json
import math
from json.encoder import encode_basestring as _quoted

MIN_INTEGER = -(2**63)
MAX_INTEGER = 2**64 - 1
MAX_DEPTH = 254

# A 19-digit run may be an integer out of range, `e-0` a float in the standard library's style.
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_RUN = b"0" * 19

_TEXT = frozenset({str})
_STANDARD = json.JSONEncoder(
    ensure_ascii=False,
    check_circular=False,
    allow_nan=False,
    sort_keys=True,
    separators=(",", ":"),
)


class CanonicalJsonError(ValueError):
    """The value has no canonical form; `fact` says which limit it breaks."""

    def __init__(self, fact: str) -> None:
        super().__init__(f"no canonical JSON: {fact}")
        self.fact = fact


def canonical_json(value: object) -> str:
    """Return the canonical text of one parsed JSON value.

    Raises CanonicalJsonError for an integer out of range, a lone surrogate, containers nested
    more than 254 deep, and for anything that is not parsed JSON. Keys are taken to be strings:
    a JSON parser makes no others.
    """
    if type(value) is dict and _TEXT.issuperset(map(type, value.values())):
        # Most items of a conversation: without numbers and containers, nothing can differ.
        pairs = [f"{_quoted(name)}:{_quoted(value[name])}" for name in sorted(value)]
        return _encodable(f"{{{','.join(pairs)}}}")
    try:
        text = _STANDARD.encode(value)
    except (ValueError, RecursionError):
        return _encodable(_exact_text(value, MAX_DEPTH))
    except TypeError as error:
        raise CanonicalJsonError("not a JSON value") from error
    if _is_suspect(text):
        text = _exact_text(value, MAX_DEPTH)
    return _encodable(text)


def _is_suspect(text: str) -> bool:
    """Whether the standard library's text may be another one than the canonical.

    Substring scans: a regular expression takes twenty times as long, and this reads every
    conversation at every call.
    """
    if "e-0" in text or text.count("[") + text.count("{") > MAX_DEPTH:
        return True
    # Only ASCII digits make a number; half a surrogate pair has no other encoding.
    encoded = text.encode("utf-8", "surrogatepass")
    return _LONG_RUN in encoded.translate(_DIGITS_AS_ZEROS)


def canonical_arguments(value: object) -> str:
    """Return the comparison form of a tool call's arguments (contract 3.3).

    Null is the empty text; a string is parsed as JSON, and one that does not parse stays as it
    is without its outer white space; everything else is its canonical JSON. The parser is the
    standard library's: it takes `NaN`, `Infinity` and integers of any size, and of a repeated
    key keeps the last.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        parsed: object = json.loads(value)
    except ValueError:
        return value.strip()
    except RecursionError as error:
        raise CanonicalJsonError(f"more than {MAX_DEPTH} containers deep") from error
    return canonical_json(parsed)


def float_text(value: float) -> str:
    """Return a double in the canonical style, `null` when it is not finite.

    The shortest digits that round-trip: `1.0`, `1e+16`, `1.5e-7`, `0.000015`, `-0.0`.
    """
    if not math.isfinite(value):
        return "null"
    text = repr(value)
    mantissa, exponent, power = text.partition("e-0")
    if not exponent:
        return text
    if power != "5":
        return f"{mantissa}e-{power}"
    sign = "-" if value < 0 else ""
    digits = mantissa.lstrip("-").replace(".", "")
    return f"{sign}0.0000{digits}"


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CanonicalJsonError("a lone surrogate") from error
    return text


def _exact_text(value: object, depth: int) -> str:
    """Write point by point; `depth` is how many containers may still open.

    One frame a container, so that the deepest legal value fits any caller's stack.
    """
    if not isinstance(value, list | dict):
        return _scalar_text(value)
    if depth == 0:
        raise CanonicalJsonError(f"more than {MAX_DEPTH} containers deep")
    parts: list[str] = []
    if isinstance(value, list):
        for item in value:
            text = _exact_text(item, depth - 1)
            parts.append(text)
        return f"[{','.join(parts)}]"
    # Code point order is the order of the UTF-8 bytes.
    for name in sorted(value):
        text = _exact_text(value[name], depth - 1)
        parts.append(f"{_quoted(name)}:{text}")
    return f"{{{','.join(parts)}}}"


def _scalar_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return float_text(value)
    if not isinstance(value, int):
        raise CanonicalJsonError("not a JSON value")
    if not MIN_INTEGER <= value <= MAX_INTEGER:
        raise CanonicalJsonError("an integer outside [-2^63, 2^64-1]")
    return str(value)
