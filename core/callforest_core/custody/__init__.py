"""Custody of tokens: deltas, digests, chain verification and the prefix splice."""
