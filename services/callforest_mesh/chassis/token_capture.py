"""What of a run is captured and what of it trains: the `token_capture` section (CFG-1).

Source: seed 1, "Configuration and supported scope".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

RETURNED_HISTORY: Final = "returned_history"
ALL_CAPTURED: Final = "all_captured"
_CUSTOM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class TokenCapture:
    """How calls are captured, found again and selected, in every service alike.

    Attributes:
        enabled: a mesh without capture is nothing; false is refused.
        forest_training: attempts are of forest mode: all selected calls train, not one chain.
        selection_policy: `returned_history`, `all_captured`, or `package.module:function`.
        min_valid_fraction_per_group: a group with a smaller part of verified rollouts is dropped
            and another asked for; None keeps every group that has a valid row.
        incomplete_capture: `mask` a rollout with pending or failed calls, or
            `train_verified_paths` of it; the latter is biased (docs/protocol.md, "Salvage").
    """

    enabled: bool = True
    forest_training: bool = False
    selection_policy: str = RETURNED_HISTORY
    min_valid_fraction_per_group: float | None = None
    incomplete_capture: Literal["mask", "train_verified_paths"] = "mask"

    def __post_init__(self) -> None:
        """Refuse what the design forbids.

        Raises:
            ValueError: the message names the key and says what to do.
        """
        if not self.enabled:
            raise ValueError("enabled must be true: there is no mesh without capture")
        policy = self.selection_policy
        if policy not in (RETURNED_HISTORY, ALL_CAPTURED) and not _CUSTOM.fullmatch(policy):
            raise ValueError(
                f"selection_policy must be {RETURNED_HISTORY}, {ALL_CAPTURED} or "
                f"package.module:function, not {policy!r}"
            )
        if policy != RETURNED_HISTORY and not self.forest_training:
            raise ValueError(
                f"selection_policy {policy!r} needs forest_training: true; chain mode trains the "
                "path to the terminal call"
            )
        least = self.min_valid_fraction_per_group
        if least is not None and not 0 < least <= 1:
            raise ValueError(f"min_valid_fraction_per_group must be above 0 and at most 1: {least}")
        if least is not None and not self.forest_training:
            raise ValueError("min_valid_fraction_per_group needs forest_training: true")
        if self.incomplete_capture != "mask" and not self.forest_training:
            raise ValueError("incomplete_capture: train_verified_paths needs forest_training: true")
