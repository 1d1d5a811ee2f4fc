"""What vLLM's reload leaves behind on a CPU: the packed output layer of tied embeddings.

On a CPU vLLM multiplies by packed copies of the weights. An output layer that is tied to the
embedding has a packed copy of its own, and a reload packs only layers that the checkpoint names:
the output layer would go on with the old weights, while every other layer has the new ones.
"""

from __future__ import annotations

from typing import Any, Final


class PackedWeights:
    """Methods that vLLM adds to its workers (its option `--worker-extension-cls`)."""

    def pack_embeddings(self) -> None:
        """Pack embeddings and output layers anew from the weights that they hold now."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        worker: Any = self
        for layer in worker.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)


PACKED_WEIGHTS: Final = f"{__name__}.{PackedWeights.__name__}"
"""The class as vLLM's option names it."""
PACK_EMBEDDINGS: Final = PackedWeights.pack_embeddings.__name__
