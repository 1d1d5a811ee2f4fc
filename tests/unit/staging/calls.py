"""Calls for the tests of Staging, honest unless a test changes them."""

import numpy as np

from callforest.capture.v1 import completion_pb2, staged_call_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.completion import complete_call

KEY = "rollout-1"
COMPLETION = completion_pb2.Completion(
    status=completion_pb2.COMPLETION_STATUS_COMPLETED,
    finish_reason="stop",
    generation_token_count=3,
    weight_version_count=1,
)


class Chain:
    """Calls of an attempt, each behind the one before."""

    def __init__(self, capture_key: str = KEY, seed: int = 0) -> None:
        self._key = capture_key
        self._random = np.random.default_rng(seed)
        self.calls: list[StagedCall] = []
        self.sequence = np.empty(0, dtype=np.uint32)

    def goes_on_in(self, capture_key: str) -> None:
        """Have later calls be another attempt's, which restored the present ones."""
        self._key = capture_key

    def add(self, call_id: str | None = None, *, tokens: int = 8) -> staged_call_pb2.StagedCall:
        """Complete a call with as many new tokens, half of them generated."""
        parent = self.calls[-1] if self.calls else None
        delta = self._random.integers(0, 2**32, tokens, dtype=np.uint32)
        carry = tokens // 2
        identity = CallIdentity(
            self._key,
            call_id or f"call-{len(self.calls):05d}",
            parent.identity.call_id if parent else None,
            parent.identity.capture_key
            if parent and parent.identity.capture_key != self._key
            else "",
        )
        call = complete_call(
            identity,
            prefix=self.sequence if parent else None,
            parent_chain_hash=parent.chain_hash if parent else None,
            prompt_ids=np.concatenate((self.sequence, delta[:carry])),
            generated_ids=delta[carry:],
            logprobs=-self._random.random(tokens - carry).astype(np.float32),
            weight_version=3,
        )
        self.calls.append(call)
        self.sequence = np.concatenate((self.sequence, delta))
        return message_of(call)


def message_of(call: StagedCall) -> staged_call_pb2.StagedCall:
    response = b'{"id":"chatcmpl-%b"}' % call.identity.call_id.encode()
    return staged_call_to_proto(call, response, COMPLETION)
