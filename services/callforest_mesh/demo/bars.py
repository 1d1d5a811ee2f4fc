"""What a run of the compacting harness must reach to have shown anything (TRN-9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bars:
    """What the figures of a run are held against.

    Attributes:
        steps: optimizer steps, each of which must have its metrics.
        groups_per_step: groups of a step, all of which must be published.
        rollouts_per_group: logical rollouts of a group.
        gen_kl_error_max: the generation KL error stays below.
        token_mult_prob_error_max: the token multiplicative probability error stays below.
    """

    steps: int
    groups_per_step: int
    rollouts_per_group: int
    gen_kl_error_max: float = 0.05
    token_mult_prob_error_max: float = 1.05

    def missed(self, figures: Mapping[str, object]) -> list[str]:
        """Give what was missed, a line a bar.

        Args:
            figures: of the RESULT line, by name.
        """
        rollouts = self.groups_per_step * self.rollouts_per_group
        groups = self.steps * self.groups_per_step
        boundaries, rows = _number(figures, "context_boundaries"), _number(figures, "max_rows")
        kl_error, error = _number(figures, "max_gen_kl_error"), _number(figures, "max_tmpe")
        # Each is true when it is reached, so that what is no number misses it.
        bars = {
            "steps": (figures["steps"] == self.steps, f"must be {self.steps}"),
            "rollouts": (
                figures["rollouts"] == self.steps * rollouts,
                f"must be {self.steps * rollouts}",
            ),
            "context_boundaries": (
                boundaries > 0,
                "must be above 0: no context was rewritten, and nothing was shown of rewriting",
            ),
            "max_rows": (rows > rollouts, f"must exceed the {rollouts} logical rollouts of a step"),
            "masked": (not figures["masked"], "must be empty: all that was accepted must train"),
            "finalized_groups": (figures["finalized_groups"] == groups, f"must be {groups}"),
            "max_reward": (_number(figures, "max_reward") > 0, "must be above 0"),
            "max_gen_kl_error": (
                kl_error < self.gen_kl_error_max,
                f"must be below {self.gen_kl_error_max}",
            ),
            "max_tmpe": (
                error < self.token_mult_prob_error_max,
                f"must be below {self.token_mult_prob_error_max}",
            ),
        }
        return [
            f"{name} is {figures[name]}, {words}"
            for name, (reached, words) in bars.items()
            if not reached
        ]


def _number(figures: Mapping[str, object], name: str) -> float:
    value = figures[name]
    return float(value) if isinstance(value, int | float) else float("nan")
