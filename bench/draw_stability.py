"""What share of seeded draws changes with the rounding of the logits: a row alone against the same row in a batch.

    python -m bench.draw_stability [MODEL] [--texts 16] [--tokens 60] [--seeds 150] [--filtered-seeds 30] [--out FILE]

Texts are continued at temperature 0.9, each alone, and the logits of every position are kept; then the same ids run
once more, all texts in one batch, which adds up the same products in another order. From both logits a token is drawn
for each seed, position and way to sample with the worker's own sampler, and those that differ are counted. On the CPU,
with one thread: what is counted does not depend on how fast the machine is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.provenance import provenance
from services.gpu_worker.attention import attention_for
from services.gpu_worker.fused_sampler import sampler_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.sampling_table import SamplingTable
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel, load_model
from services.launcher.models import resolve_model
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from services.runtime.config import Settings
from services.wire.request_params import SamplingParams

TEMPERATURE = 0.9
TOP_P = 0.9
BEGINNINGS = (
    "Once upon a time there was a", "The most important thing to know about rivers is",
    "def read_lines(path):\n", "Dear Sir or Madam,\n\nI am writing to", "Ingredients: two eggs, some flour,",
    "1, 2, 3, 4, 5,", "The capital of France is", "In the year 1848 the people of", "Q: Why is a bicycle stable?\nA:",
    "She opened the door and saw", "A prime number is", "| name | age |\n|---|---|\n| Anna |", "Le chat est",
    "Breaking news: scientists have found", "The theorem follows from", "My favourite song begins with",
)  # fmt: skip
_CPU = torch.device("cpu")
_PAGE_SIZE = 16


@dataclass
class Text:
    """Ids, of which the first `num_prompt` were given, and the pages of their keys and values."""

    token_ids: list[int]
    num_prompt: int
    page_ids: list[int]


@dataclass(frozen=True)
class Logits:
    """The same positions computed twice, [num_positions, vocab_size] float32 each.

    `positions` ([num_positions] int64) are those of the tokens that these logits decide.
    """

    alone: Tensor
    together: Tensor
    positions: np.typing.NDArray[np.int64]

    @property
    def largest_difference(self) -> float:
        """Of any logit."""
        return float((self.alone - self.together).abs().max())


@dataclass(frozen=True)
class Changes:
    """How many of so many draws gave another token."""

    num_draws: int
    num_changed: int


def compute_logits(
    model: LoadedModel, prompts: Sequence[list[int]], num_tokens: int, say: Callable[[str], None]
) -> Logits:
    """Continues the prompts by so many tokens each, one by one and then all at once with the same ids.

    Args:
        model: on the CPU, in float32.
        prompts: ids, at least one each.
        num_tokens: positions of each text, at least 1.
        say: is told of every step that takes a while.
    """
    page_counts = [-(-(len(prompt) + num_tokens) // _PAGE_SIZE) for prompt in prompts]
    pages = iter(range(sum(page_counts)))
    texts = [
        Text(list(prompt), len(prompt), [next(pages) for _ in range(count)])
        for prompt, count in zip(prompts, page_counts, strict=True)
    ]
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, torch.float32)
    runner = ModelRunner(
        config, model.weights, KvCache(shape, sum(page_counts), _CPU), attention_for(_CPU, torch.float32)
    )
    generator = torch.Generator().manual_seed(1)
    alone = []
    for number, text in enumerate(texts, start=1):
        alone.append(_continue(runner, text, num_tokens, generator))
        say(f"text {number} of {len(texts)} written")
    together = _repeat(runner, texts, num_tokens)
    say(f"all {len(texts)} computed in one batch")
    positions = np.concatenate([np.arange(num_tokens, dtype=np.int64) + text.num_prompt for text in texts])
    return Logits(torch.cat(alone), together, positions)


def _continue(runner: ModelRunner, text: Text, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Draws tokens onto the text; the logits of each, [num_tokens, vocab_size]."""
    found = []
    start = 0
    for _ in range(num_tokens):
        logits = _step(runner, [text], [(start, len(text.token_ids))])
        found.append(logits)
        start = len(text.token_ids)
        chances = (logits[0] / TEMPERATURE).softmax(-1)
        text.token_ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    return torch.cat(found)


def _repeat(runner: ModelRunner, texts: Sequence[Text], num_tokens: int) -> Tensor:
    """The logits of the same positions, text by text, from steps in which all texts take part."""
    steps = []
    for index in range(num_tokens):
        spans = [(text.num_prompt + index - 1 if index else 0, text.num_prompt + index) for text in texts]
        steps.append(_step(runner, texts, spans))
    return torch.stack(steps, dim=1).flatten(0, 1)


def _step(runner: ModelRunner, texts: Sequence[Text], spans: Sequence[tuple[int, int]]) -> Tensor:
    """The logits after each text's tokens [start, end), whose earlier ones are in the pool: [num_texts, vocab_size]."""
    rows = [
        StepRow(text.token_ids[start:end], start, text.page_ids, samples=True)
        for text, (start, end) in zip(texts, spans, strict=True)
    ]
    return runner.forward(build_step_inputs(rows, _PAGE_SIZE, _CPU))


def count_changes(logits: Logits, top_p: float, num_seeds: int) -> Changes:
    """Draws a token for each position and each of so many seeds, from both logits."""
    num_rows = len(logits.positions)
    rows = np.arange(num_rows, dtype=np.int64)
    table = SamplingTable(num_rows, _CPU)
    sample = sampler_for(_CPU)
    num_changed = 0
    for seed in range(num_seeds):
        table.set_rows(range(num_rows), [SamplingParams(TEMPERATURE, top_p, 0, 0.0, seed, 0)] * num_rows)
        groups = table.groups(rows, logits.positions)
        alone, together = sample(logits.alone, groups), sample(logits.together, groups)
        num_changed += int((alone.token_ids != together.token_ids).sum())
    return Changes(num_rows * num_seeds, num_changed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints what changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--texts", type=int, default=len(BEGINNINGS), help=f"1 to {len(BEGINNINGS)}")
    parser.add_argument("--tokens", type=int, default=60, help="positions of each text")
    parser.add_argument("--seeds", type=int, default=150, help="draws of each position without top_p")
    parser.add_argument("--filtered-seeds", type=int, default=30, help=f"draws of each position with top_p {TOP_P}")
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if not 1 <= options.texts <= len(BEGINNINGS) or min(options.tokens, options.seeds, options.filtered_seeds) < 1:
        parser.error(f"at least one of each, and at most {len(BEGINNINGS)} texts")
    torch.set_num_threads(1)
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    files = open_model(resolve_model(options.model, Settings()).path)
    tokenizer = load_tokenizer(files).tokenizer
    prompts = [tokenizer.encode(text).ids for text in BEGINNINGS[: options.texts]]
    logits = compute_logits(load_model(files, _CPU, torch.float32), prompts, options.tokens, _say)
    print(f"logits differ by {logits.largest_difference:.1e} at most")
    results: dict[str, dict[str, int]] = {}
    for name, top_p, num_seeds in (("all", 1.0, options.seeds), (f"top_p {TOP_P}", TOP_P, options.filtered_seeds)):
        changes = count_changes(logits, top_p, num_seeds)
        print(f"{name}: {changes.num_changed} of {changes.num_draws:,} draws changed", flush=True)
        results[name] = {"draws": changes.num_draws, "changed": changes.num_changed}
    if options.out is not None:
        sizes = {"texts": options.texts, "tokens": options.tokens, "temperature": TEMPERATURE}
        report = source | sizes | {"largest_difference": logits.largest_difference, "changes": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
