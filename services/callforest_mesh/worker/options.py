"""What a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker.

    Attributes:
        state_path: directory that remembers the last weight update over a restart.
        stage_timeout_s: how long staging a call may take before the call is served without
            capture (CAP-7).
        prefix_timeout_s: how long fetching a predecessor's tokens may take before the call is
            rendered without them and served without capture.
        prefix_cache_bytes: memory for whole sequences of earlier calls.
        running_max: calls in work at once; more are refused as overloaded.
        name: the engine's name in errors.
    """

    state_path: Path
    stage_timeout_s: float = 10.0
    prefix_timeout_s: float = 5.0
    prefix_cache_bytes: int = 256 << 20
    running_max: int = 1024
    name: str = "engine"

    def __post_init__(self) -> None:
        """Refuse values out of their range.

        Raises:
            ValueError: the message names the option.
        """
        if self.stage_timeout_s <= 0 or self.prefix_timeout_s <= 0:
            raise ValueError("stage_timeout_s and prefix_timeout_s must be above 0")
        if self.running_max < 1 or self.prefix_cache_bytes < 0:
            raise ValueError("running_max must be at least 1, prefix_cache_bytes at least 0")
