"""What one vLLM engine is started with; both sides of the process border read it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from callforest_mesh.worker.vllm.packed_weights import PACKED_WEIGHTS

Device = str
CPU: Device = "cpu"
GPU: Device = "gpu"


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """One vLLM engine.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        served_model_name: name that requests may use for the model.
        device: "cpu" or "gpu"; decides which environment variables the child gets.
        dtype: of the weights and activations; "float32" where logprobs are compared.
        context_token_count: most tokens a prompt and its generation may have together; 0 takes
            the checkpoint's own.
        concurrent_sequences: most sequences generated at once.
        seed: of requests that bring none.
        tool_call_parser: name of vLLM's parser for tool calls; "" leaves them in the text.
        reasoning_parser: name of vLLM's parser for reasoning; "" leaves it in the text.
        chat_template: a template file instead of the checkpoint's own; "" for its own.
        generation_config: "vllm" samples with neutral defaults (what a policy gradient assumes),
            "auto" with those of the checkpoint.
        logprobs_mode: "raw_logprobs" is before temperature and truncation, "processed_logprobs"
            after.
        weight_version: version that the checkpoint itself counts as.
        kv_cache_gib: memory for the cache of keys and values on a CPU, GiB.
        gpu_memory_fraction: part of a GPU's memory that vLLM may take.
        tensor_parallel_size: processes that share each layer.
        more_arguments: further command-line arguments of vLLM, as they are.
    """

    model: str
    served_model_name: str = "policy"
    device: Device = CPU
    dtype: str = "auto"
    context_token_count: int = 0
    concurrent_sequences: int = 32
    seed: int = 0
    tool_call_parser: str = "hermes"
    reasoning_parser: str = ""
    chat_template: str = ""
    generation_config: str = "vllm"
    logprobs_mode: str = "raw_logprobs"
    weight_version: int = 0
    kv_cache_gib: int = 1
    gpu_memory_fraction: float = 0.85
    tensor_parallel_size: int = 1
    more_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would only fail in the child, half a minute later.

        Raises:
            ValueError: a value is out of its range; the message names it.
        """
        if self.device not in (CPU, GPU):
            raise ValueError(f"device must be {CPU!r} or {GPU!r}, not {self.device!r}")
        for name in ("concurrent_sequences", "kv_cache_gib", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("context_token_count", "weight_version"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def to_json(self) -> str:
        """Write the options for the child's command line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> VllmOptions:
        """Read what `to_json` wrote.

        Raises:
            TypeError: a field is unknown.
            ValueError: the text is no JSON, or a value is out of its range.
        """
        fields = json.loads(text)
        fields["more_arguments"] = tuple(fields.get("more_arguments", ()))
        return cls(**fields)

    def arguments(self) -> list[str]:
        """Spell the options as command-line arguments of vLLM's API server."""
        arguments = [
            "--model", self.model,
            "--served-model-name", self.served_model_name,
            "--dtype", self.dtype,
            "--max-num-seqs", str(self.concurrent_sequences),
            "--seed", str(self.seed),
            "--generation-config", self.generation_config,
            "--logprobs-mode", self.logprobs_mode,
            "--tensor-parallel-size", str(self.tensor_parallel_size),
            "--disable-log-stats",
        ]  # fmt: skip
        if self.context_token_count:
            arguments += ["--max-model-len", str(self.context_token_count)]
        if self.tool_call_parser:
            arguments += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_call_parser]
        if self.reasoning_parser:
            arguments += ["--reasoning-parser", self.reasoning_parser]
        if self.chat_template:
            arguments += ["--chat-template", self.chat_template]
        if self.device == CPU:
            arguments += ["--enforce-eager", "--worker-extension-cls", PACKED_WEIGHTS]
        else:
            arguments += ["--gpu-memory-utilization", str(self.gpu_memory_fraction)]
        return [*arguments, *self.more_arguments]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Environment variables for the child, over those it inherits.

        Args:
            scratch: a directory of the child's own, where vLLM puts its sockets, caches and
                rendezvous files. Keep the path short: a socket's path ends at 107 bytes.
        """
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
        }
        if self.device == CPU:
            variables |= {
                # Eager mode still compiles the sampler at the first request, for many seconds.
                "TORCH_COMPILE_DISABLE": "1",
                # The engine core keeps its worker in its own process: one process fewer.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # More threads than cores to spare make small models slower, not faster.
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
                # Nothing is compiled, so nothing is worth keeping; on a GPU it is.
                "VLLM_CACHE_ROOT": str(scratch / "cache"),
            }
        return variables
