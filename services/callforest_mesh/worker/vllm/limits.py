"""The bounds of the line between the worker and its engine: deadlines and repeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """Deadlines and repeats, in seconds.

    Attributes:
        start_s: until the engine can generate; large models load for minutes.
        generate_s: one generation.
        measure_s: one measure of a prompt.
        load_s: one weight update.
        stop_s: for the child to end by itself before it is killed.
        restarts_most: failed starts in a row before the engine stays down.
        backoff_s: pause before the first restart; it doubles with each failure in a row.
        backoff_most_s: longest pause.
    """

    start_s: float = 600.0
    generate_s: float = 900.0
    measure_s: float = 60.0
    load_s: float = 300.0
    stop_s: float = 20.0
    restarts_most: int = 5
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0
