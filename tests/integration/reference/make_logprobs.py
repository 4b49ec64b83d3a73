"""Writes logprobs.json: what transformers says of 20 prompts with the demo model's weights in float32.

    python tests/integration/reference/make_logprobs.py PATH_TO_GGUF

The prompts are those of prompts.json and the texts below. For each: the log-probability of every prompt token but the
first, the five likeliest ids at a few of these places, and for six greedy tokens after it their log-probabilities and
the five likeliest. The hidden states after the final norm, of the last token and the mean, are kept for the first eight
of their numbers and as a length, which a wrong norm or a wrong mean would change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS, NUM_TOP, TOP_EVERY, NUM_STATES = 6, 5, 7, 8
HERE = Path(__file__).parent
MORE = (
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Ein kurzer Satz, der auf Deutsch geschrieben ist und",
    "Привет, как дела? Сегодня мы",
    "東京の天気は晴れです。明日は",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "',
    "Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of Spain?\nA:",
)


def main(gguf_path: Path) -> None:
    """Computes and writes the reference."""
    options = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**options)
    model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32).eval()
    texts = [prompt["text"] for prompt in json.loads((HERE / "prompts.json").read_text("utf-8")) if "text" in prompt]
    prompts = [tokenizer(text)["input_ids"] for text in [*texts, *MORE]]
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    lines = ",\n".join(json.dumps(_said_of(model, prompt_ids)) for prompt_ids in prompts)
    (HERE / "logprobs.json").write_text(f'{{"made_by": "{made_by}", "prompts": [\n{lines}\n]}}\n', "utf-8")
    print(f"{len(prompts)} prompts", file=sys.stderr)


@torch.inference_mode()
def _said_of(model: transformers.PreTrainedModel, prompt_ids: list[int]) -> dict[str, Any]:
    answer = model(input_ids=torch.tensor([prompt_ids]), output_hidden_states=True)
    states = answer.hidden_states[-1][0]
    logprobs = answer.logits[0].log_softmax(-1)
    own = [logprobs[at, token] for at, token in enumerate(prompt_ids[1:])]
    ids = list(prompt_ids)
    output = []
    for _ in range(NUM_TOKENS):
        after = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(after.argmax()))
        output.append(_likeliest(after))
    return {
        "prompt_ids": prompt_ids,
        "prompt": _rounded(own),
        "prompt_top": {at + 1: _likeliest(logprobs[at]) for at in range(0, len(prompt_ids) - 1, TOP_EVERY)},
        "output_ids": ids[len(prompt_ids) :],
        "output_top": output,
        "last_state": _rounded(states[-1][:NUM_STATES]),
        "last_length": float(states[-1].norm()),
        "mean_state": _rounded(states.mean(0)[:NUM_STATES]),
        "mean_length": float(states.mean(0).norm()),
    }


def _likeliest(logprobs: torch.Tensor) -> list[tuple[int, float]]:
    best = logprobs.topk(NUM_TOP)
    return list(zip(best.indices.tolist(), _rounded(best.values), strict=True))


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 5) for value in values]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
