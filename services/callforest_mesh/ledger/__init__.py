"""The durable, append-only, token-free record of attempts and calls."""
