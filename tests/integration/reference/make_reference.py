"""Writes greedy.json: what transformers makes of prompts.json with the demo model's weights in float32.

    python tests/integration/reference/make_reference.py PATH_TO_GGUF

An independent path: transformers reads the GGUF file, builds its own tokenizer and model, and decodes greedily with its
own cache. The end ids are ignored so that every answer has 64 tokens; a row's smallest gap between the two best logits
is kept beside it, to judge a difference by.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
HERE = Path(__file__).parent


def main(gguf_path: Path) -> None:
    """Computes and writes the reference."""
    options = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**options)
    model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32).eval()
    answers = [_answer(model, tokenizer, prompt) for prompt in json.loads((HERE / "prompts.json").read_text("utf-8"))]
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    (HERE / "greedy.json").write_text(f'{{"made_by": "{made_by}", "answers": [\n{lines}\n]}}\n', "utf-8")


@torch.inference_mode()
def _answer(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, prompt: dict[str, str]
) -> dict[str, object]:
    if "chat" in prompt:
        messages = [{"role": "user", "content": prompt["chat"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = prompt["text"]
    prompt_ids = tokenizer(text, add_special_tokens="chat" not in prompt)["input_ids"]
    ids: list[int] = []
    gaps: list[float] = []
    cache, new = None, torch.tensor([prompt_ids])
    for _ in range(NUM_TOKENS):
        output = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        new = torch.tensor([[ids[-1]]])
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    print(f"{prompt['name']}: smallest gap {min(gaps):.4f}: {text!r}", file=sys.stderr)
    return {**prompt, "prompt_ids": prompt_ids, "ids": ids, "text": text, "smallest_gap": round(min(gaps), 5)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
