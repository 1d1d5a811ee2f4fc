"""One set of channel options for every client and server of the mesh.

Sources: docs/protocol.md, section "Limits"; gRPC's keepalive guide (both sides are set together,
else the server tells the client to calm down).
"""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

Options: TypeAlias = list[tuple[str, int]]

MESSAGE_BYTES_MAX = 64 << 20
"""What our own channels accept. What is sent stays far below, so that default peers work too."""

CLIENT_OPTIONS: Options = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: Options = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.so_reuseport", 0),
]


def connect(target: str) -> grpc.aio.Channel:
    """Open a channel to `host:port` or `unix:/path`. It connects when it is first used."""
    return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
