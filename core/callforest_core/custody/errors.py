"""Refusals of a capture: each says why in one stable word and carries its facts."""

from __future__ import annotations


class CaptureError(Exception):
    """A call cannot be captured. The completion is still served (CAP-7); the capture is poisoned.

    Attributes:
        reason: a stable machine-readable word, never re-purposed.
        detail: the facts, for a person.

    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class IdentityError(CaptureError):
    """An identity or the lineage that goes with it is incomplete or cannot be digested."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid_identity", detail)


class PrefixMismatchError(CaptureError):
    """The generation prompt does not begin with the authorised prefix (ADM-6).

    Attributes:
        position: the first token that differs, or the shorter length.

    """

    def __init__(self, position: int, prefix_len: int, prompt_len: int) -> None:
        super().__init__(
            "prefix_mismatch",
            f"prompt of {prompt_len} tokens leaves the prefix of {prefix_len} at token {position}",
        )
        self.position = position


class CountMismatchError(CaptureError):
    """Two counts of the generated tokens differ (ids, logprobs, or the engine's own report)."""

    def __init__(self, token_count: int, other_count: int, other: str) -> None:
        super().__init__(
            "count_mismatch", f"{token_count} generated ids but {other_count} by {other}"
        )
        self.token_count = token_count
        self.other_count = other_count


class NonFiniteLogprobError(CaptureError):
    """The logprob of a sampled token is not finite in float32.

    Attributes:
        position: index of the first such token in the generation.

    """

    def __init__(self, position: int) -> None:
        super().__init__("non_finite_logprob", f"generated token {position}")
        self.position = position


class EmptyDeltaError(CaptureError):
    """The call adds no token at all, neither prompt nor generation."""

    def __init__(self) -> None:
        super().__init__("empty_delta", "the call adds no token")


class TokenOutOfRangeError(CaptureError):
    """Token ids are not integers in [0, 2^32), the range of the canonical columns."""

    def __init__(self, detail: str) -> None:
        super().__init__("token_out_of_range", detail)


class WeightVersionError(CaptureError):
    """The weight version is not an unsigned 64-bit integer."""

    def __init__(self, weight_version: int) -> None:
        super().__init__("weight_version_out_of_range", str(weight_version))
        self.weight_version = weight_version


class ExtrasError(CaptureError):
    """Extras have no canonical encoding, or bytes are not one (capture contract 2.5)."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid_extras", detail)


class SpliceRefusedError(CaptureError):
    """The boundary between captured prefix and rendered suffix is not proven (ADM-6)."""


class CandidateWithoutProofError(Exception):
    """A candidate does not say in which sense the histories match; nothing may be generated."""
