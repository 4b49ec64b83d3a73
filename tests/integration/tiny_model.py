"""A tiny Llama with random weights and a tokenizer of bytes, in the files of a real one: quick, and says nonsense."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.random_checkpoints import Shape, write_checkpoint
from tests.unit.model_files.trained_vocabularies import spell_bytes

CONTEXT = 256
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """Writes the model into a new folder, and returns the folder; every byte is a token of its own."""
    num_tokens = 256 + len(CONTROL)
    shape = Shape(vocab_size=num_tokens, num_layers=1, max_positions=CONTEXT)
    write_checkpoint(folder, "llama", shape)
    vocabulary = {spell_bytes(bytes([byte])): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}), encoding="utf-8")
    return folder
