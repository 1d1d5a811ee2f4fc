"""What transformers says about a checkpoint, to judge an engine by."""

from pathlib import Path

import numpy as np

from callforest_mesh.worker.engine import TokenIds


class Reference:
    """The same checkpoint under transformers: what the model says about given tokens."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def logprobs(self, prompt: TokenIds, generated: TokenIds) -> np.ndarray:
        """Force the tokens through the model; the logprob of each generated one, [generated]."""
        tokens = self._torch.tensor([[*prompt.tolist(), *generated.tolist()]])
        with self._torch.no_grad():
            scores = self._model(tokens).logits[0].double().log_softmax(-1)
        positions = np.arange(len(prompt) - 1, len(prompt) + len(generated) - 1)
        return scores.numpy()[positions, generated]

    def greedy(self, prompt: TokenIds, count: int) -> list[int]:
        """The likeliest continuation."""
        tokens = prompt.tolist()
        for _ in range(count):
            with self._torch.no_grad():
                scores = self._model(self._torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(scores.argmax()))
        return tokens[len(prompt) :]
