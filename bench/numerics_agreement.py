"""How far `--numerics fast` is from `exact`: next-token distributions of the same texts, and the greedy texts of both.

    python -m bench.numerics_agreement [MODEL] [--texts 16] [--tokens 64] [--quantization int8] [--out FILE]

Texts are continued greedily in exact numerics. Of every position of them, prompt and continuation, both ways give a
distribution over the next token: what is told is the mean Kullback-Leibler divergence of fast from exact in nats, its
99th percentile, and at how many positions both find the same likeliest token. This is told twice, because matrices may
have a form for few rows and one for many: with a text computed at once, as a prompt is, and token by token, as an
answer is. Then the texts are continued in fast numerics too, one at a time, and those that are the same to the end are
counted; and once more together, one more of them joining in every fourth step, as requests do that share a server. On
the CPU; how fast the machine is does not matter.

With the demo model on two cores: a quarter of a minute to load it twice, seven seconds a text, three minutes in all. A
terminal shows what is computed now.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.draw_stability import BEGINNINGS
from bench.provenance import provenance
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.integer_weights import INTEGERS, rounded
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.kv_dtype import choose_kv_dtype
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.kernels import has_fast_bfloat16
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import load_laid_out, load_model
from services.launcher.models import resolve_model
from services.launcher.running_status import RunningStatus
from services.launcher.terminal import Terminal
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from services.runtime.config import Settings

_CPU = torch.device("cpu")
_PAGE_SIZE = 16
_JOIN_STEPS = 4


@dataclass(frozen=True)
class Agreement:
    """Of all positions: divergences in nats, [num_positions] float64; at how many the likeliest token is the same."""

    divergences: Tensor
    num_same: int

    @property
    def mean(self) -> float:
        """Mean divergence."""
        return float(self.divergences.mean())

    @property
    def p99(self) -> float:
        """What 99 of 100 positions do not exceed."""
        return float(self.divergences.quantile(0.99))

    @property
    def same_share(self) -> float:
        """Share of positions with the same likeliest token."""
        return self.num_same / len(self.divergences)

    @property
    def numbers(self) -> dict[str, float]:
        """For the report."""
        return {"mean_divergence": self.mean, "p99_divergence": self.p99, "same_likeliest_share": self.same_share}


class Writer:
    """Computes texts in one of the two ways, up to `num_rows` of them together."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[Projection],
        num_rows: int,
        max_tokens: int,
        *,
        is_exact: bool,
    ) -> None:
        num_pages = -(-max_tokens // _PAGE_SIZE)
        self._pages = [list(range(row * num_pages, (row + 1) * num_pages)) for row in range(num_rows)]
        settings = Settings(numerics="exact" if is_exact else "fast")
        kv_dtype = choose_kv_dtype(settings, _CPU, torch.float32, config.head_dim)
        shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, kv_dtype)
        pool = KvCache(shape, num_rows * num_pages, _CPU)
        rounds_prompts = not is_exact and has_fast_bfloat16()
        attention = PagedCpuAttention(kv_dtype, computes_in=torch.float32, rounds_prompts=rounds_prompts)
        self._runner = ModelRunner(config, weights, pool, attention, operators_for(_CPU))

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[num_tokens, vocab_size] of a text from its beginning."""
        return self._step(ids, 0)

    def logits_by_token(self, ids: Sequence[int]) -> Tensor:
        """Likewise, each token in a step of its own."""
        return torch.cat([self._step(ids[place : place + 1], place) for place in range(len(ids))])

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The prompt and its greedy continuation."""
        ids, start = list(prompt), 0
        for _ in range(num_tokens):
            logits = self._step(ids[start:], start)
            start = len(ids)
            ids.append(int(logits[-1].argmax()))
        return ids

    def continuations(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The prompts and their greedy continuations, computed together; each joins some steps after the one before."""
        texts, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for step in range(num_tokens + _JOIN_STEPS * (len(prompts) - 1)):
            here = [row for row in range(len(texts)) if 0 <= step - _JOIN_STEPS * row < num_tokens]
            rows = [StepRow(texts[row][starts[row] :], starts[row], self._pages[row], True) for row in here]
            logits = self._runner.forward(build_step_inputs(rows, _PAGE_SIZE, _CPU))
            for row, token_id in zip(here, logits.argmax(-1).tolist(), strict=True):
                starts[row] = len(texts[row])
                texts[row].append(token_id)
        return texts

    def _step(self, new_ids: Sequence[int], start: int) -> Tensor:
        inputs = build_step_inputs([StepRow(new_ids, start, self._pages[0], True)], _PAGE_SIZE, _CPU)
        return self._runner.logits(self._runner.normed(self._runner.hidden(inputs), torch.arange(len(new_ids))))


def agreement_of(exact: Tensor, fast: Tensor) -> Agreement:
    """Compares logits of the same positions, [num_positions, vocab_size] float32 each."""
    expected, found = (logits.double().log_softmax(-1) for logits in (exact, fast))
    divergences = (expected.exp() * (expected - found)).sum(-1)
    return Agreement(divergences, int((exact.argmax(-1) == fast.argmax(-1)).sum()))


def joined(parts: Sequence[Agreement]) -> Agreement:
    """That of several texts together."""
    return Agreement(torch.cat([part.divergences for part in parts]), sum(part.num_same for part in parts))


@dataclass(frozen=True)
class Compared:
    """What was found: agreements of each text at once and token by token, its texts in both ways, and in company."""

    at_once: list[Agreement]
    by_token: list[Agreement]
    exact_texts: list[list[int]]
    fast_texts: list[list[int]]
    fast_together: list[list[int]]

    @property
    def num_same(self) -> int:
        """Texts that are the same in both ways."""
        return sum(exact == fast for exact, fast in zip(self.exact_texts, self.fast_texts, strict=True))

    @property
    def num_same_together(self) -> int:
        """Texts that are the same in company as alone."""
        return sum(alone == joint for alone, joint in zip(self.fast_texts, self.fast_together, strict=True))


def compare(
    exact: Writer, fast: Writer, prompts: Sequence[Sequence[int]], num_tokens: int, status: RunningStatus
) -> Compared:
    """Continues the prompts in both ways; `status` is told what is computed, and of each text once it is done."""
    found = Compared([], [], [], [], [])
    for number, prompt in enumerate(prompts, start=1):
        which = f"text {number} of {len(prompts)}"
        status.show(f"{which}: written in exact numerics")
        text = exact.continuation(prompt, num_tokens)
        expected = exact.logits(text)
        status.show(f"{which}: computed in fast numerics, at once and token by token")
        found.at_once.append(agreement_of(expected, fast.logits(text)))
        found.by_token.append(agreement_of(expected, fast.logits_by_token(text)))
        found.exact_texts.append(text)
        status.show(f"{which}: written in fast numerics")
        found.fast_texts.append(fast.continuation(prompt, num_tokens))
        status.line(
            f"{which}: divergence {found.at_once[-1].mean:.1e} at once, {found.by_token[-1].mean:.1e} token by token"
        )
    status.show(f"{len(prompts)} texts written together")
    found.fast_together.extend(fast.continuations(prompts, num_tokens))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "",
        epilog="The demo model takes about three minutes on two cores, in proportion to texts and tokens.",
    )
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--texts", type=int, default=len(BEGINNINGS), help=f"1 to {len(BEGINNINGS)}")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--quantization", choices=("none", *INTEGERS), default="none", help="of the fast model")
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if not 1 <= options.texts <= len(BEGINNINGS) or options.tokens < 1:
        parser.error(f"1 to {len(BEGINNINGS)} texts of at least one token")
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    files = open_model(resolve_model(options.model, Settings()).path)
    with RunningStatus(Terminal(sys.stderr)) as status:
        status.show("loading the model in exact numerics")
        model = load_model(files, _CPU, torch.float32)
        status.show("loading the model in fast numerics")
        forms = rounded(CpuForms(is_exact=False), Settings(quantization=options.quantization), model.config)
        fast_model = load_laid_out(files, forms)
        tokenizer = load_tokenizer(files).tokenizer
        prompts = [tokenizer.encode(text).ids for text in BEGINNINGS[: options.texts]]
        longest = max(map(len, prompts)) + options.tokens
        status.line(f"fast: {forms.description}")
        exact = Writer(model.config, model.weights, 1, longest, is_exact=True)
        fast = Writer(model.config, fast_model.weights, len(prompts), longest, is_exact=False)
        compared = compare(exact, fast, prompts, options.tokens, status)
    found = {"at_once": joined(compared.at_once), "by_token": joined(compared.by_token)}
    for name, agreement in found.items():
        print(
            f"{name}: {len(agreement.divergences)} positions, divergence {agreement.mean:.2e} on average, "
            f"{agreement.p99:.2e} at the 99th percentile; same likeliest token at {100 * agreement.same_share:.2f} %"
        )
    print(
        f"{compared.num_same} of {len(prompts)} greedy texts of {options.tokens} tokens the same as in exact numerics, "
        f"{compared.num_same_together} the same together as alone"
    )
    if options.out is not None:
        report = source | {
            "fast": forms.description,
            "quantization": options.quantization,
            "positions": len(found["at_once"].divergences),
            **{name: agreement.numbers for name, agreement in found.items()},
            "texts": len(prompts),
            "tokens": options.tokens,
            "same_texts": compared.num_same,
            "same_texts_together": compared.num_same_together,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
