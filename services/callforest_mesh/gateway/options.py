"""What a gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """One gateway.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        tenant: owns every attempt that this gateway serves.
        control_token: bearer token of the control route; with "" the route refuses everyone.
        calls_max: calls in work at once; more get 429.
        measures_max: calls that are measured at once; more get 429.
        body_timeout_s: how long a request's body may take to arrive, and the head of the first one
            on a connection.
        generate_timeout_s: how long a generation may take, its capture included.
        commit_timeout_s: how long the ledger's row of a call may take to become durable; then
            nothing is served.
        keep_alive_s: how long a harness that asked for events gets nothing; then the status line,
            and a comment every so often, keep its connection until the call's row is durable.
        repeat_grace_s: how long a call whose fate is not known, or whose harness left, is left to a
            repeat before it is given up.
        grace_s: how long calls may go on when the gateway stops, and then as long answers on their
            way, and what is left of calls.
        forest: whether calls find what they continue by their whole source history (forest mode)
            instead of by what models wrote (chain mode); attempts must be opened alike.
        history_cache_bytes: forest mode: what the kept histories may take.
        history_cache_calls: forest mode: how many calls' histories are kept.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tenant: str = "default"
    control_token: str = field(default="", repr=False)
    calls_max: int = 1024
    measures_max: int = 64
    body_timeout_s: float = 60.0
    generate_timeout_s: float = 600.0
    commit_timeout_s: float = 15.0
    keep_alive_s: float = 15.0
    repeat_grace_s: float = 5.0
    grace_s: float = 10.0
    forest: bool = False
    history_cache_bytes: int = 256 << 20
    history_cache_calls: int = 65536

    def __post_init__(self) -> None:
        """Refuse values out of their range.

        Raises:
            ValueError: the message names the option.
        """
        if min(self.calls_max, self.measures_max) < 1:
            raise ValueError("calls_max and measures_max must be at least 1")
        if min(self.body_timeout_s, self.generate_timeout_s, self.commit_timeout_s) <= 0:
            raise ValueError("body, generate and commit timeouts must be above 0")
        if self.keep_alive_s <= 0:
            raise ValueError("keep_alive_s must be above 0")
        if self.grace_s < 0 or self.repeat_grace_s < 0:
            raise ValueError("grace_s and repeat_grace_s must not be negative")
        if self.history_cache_bytes < 0 or self.history_cache_calls < 0:
            raise ValueError("history_cache_bytes and history_cache_calls must not be negative")
