"""A tiny random Qwen3 checkpoint, so that a whole rollout runs on a laptop.

It writes nonsense, quickly and reproducibly: the same seed gives the same bytes. The tokenizer is a
byte-level BPE of its own (all 256 bytes, digits one token each), the template is ChatML with tools
in the Hermes manner, so that real renderers and real tool-call parsers have their work to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_SIZE = 512
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_CALL_START = "<tool_call>"
TOOL_CALL_END = "</tool_call>"

_CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Visible in the text, as in the checkpoints that are trained on this format: parsers look for them.
_TOOL_TOKENS = (TOOL_CALL_START, TOOL_CALL_END)

_CORPUS = (
    "You are a helpful assistant that answers in few words and calls tools when it must.",
    "What is twelve plus thirty? The answer is 42, because 12 + 30 = 42.",
    "system user assistant tool function parameters properties required description string",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    '{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}',
    "def add(first: int, second: int) -> int:\n    return first + second\n",
    "The quick brown fox jumps over the lazy dog while the forest keeps every call it heard.",
    "Which room holds the key? Open the door, look around, take the lamp and go north.",
    "To be, or not to be, that is the question, whether the answer is right or wrong.",
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- (messages[0].content or '') + '\\n\\n' }}
{%- endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\nTo call one, write its name and arguments as JSON in <tool_call></tool_call>.' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{%- if not (loop.first and not content) %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}
{{- call.function.arguments }}
{%- else %}
{{- call.function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tiny_model(
    directory: Path,
    *,
    seed: int,
    layer_count: int = 2,
    hidden_size: int = 64,
    context_token_count: int = 2048,
) -> Path:
    """Write a checkpoint (weights, configuration, tokenizer, template) and return its directory.

    Args:
        directory: where to write; created when it does not exist.
        seed: of the weights alone; the tokenizer and the template are always the same, so that two
            seeds are two versions of one model.
        layer_count: transformer layers.
        hidden_size: width; a multiple of 16 (four heads).
        context_token_count: most tokens a prompt and its generation may have together.

    Raises:
        ValueError: `hidden_size` cannot be divided among the heads.
    """
    if hidden_size <= 0 or hidden_size % 16:
        raise ValueError(f"hidden_size must be a positive multiple of 16, not {hidden_size}")
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, context_token_count)
    _write_weights(directory, seed, layer_count, hidden_size, context_token_count)
    return directory


def _train_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(_TOOL_TOKENS),
        special_tokens=list(_CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _TOOL_TOKENS])
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY_SIZE:
        raise AssertionError(
            f"the corpus fills {size} of {VOCABULARY_SIZE} ids; every id must decode"
        )
    return tokenizer


def _write_tokenizer(directory: Path, context_token_count: int) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=context_token_count,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def _write_weights(
    directory: Path, seed: int, layer_count: int, hidden_size: int, context_token_count: int
) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layer_count,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context_token_count,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        # Wide enough that the distributions of two seeds differ plainly.
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=_CONTROL_TOKENS.index(TURN_END),
        # A padding token's embedding is zero, and a model that samples one has wild gradients.
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()
