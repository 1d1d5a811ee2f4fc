"""The digest over everything that decides how a conversation becomes tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What a checkpoint directory may hold beside its weights that shapes rendering or stopping.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def digest_configuration(model: Path, chat_template: Path | None) -> bytes:
    """Hash model configuration, chat template and tokenizer files to 32 bytes (SHA-256).

    The layout is, for each present file in the order of its name: length and bytes of the name,
    length and bytes of the content, lengths as unsigned 64-bit big-endian. A template that
    overrides the checkpoint's own counts under the name "override".

    Raises:
        FileNotFoundError: the directory has no config.json, or the template does not exist.
    """
    contents = {
        name: (model / name).read_bytes()
        for name in _FILES
        if name == "config.json" or (model / name).is_file()
    }
    if chat_template is not None:
        contents["override"] = chat_template.read_bytes()
    digest = hashlib.sha256()
    for name in sorted(contents):
        for part in (name.encode(), contents[name]):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.digest()
