"""What sampling costs a step, by what its rows ask for: rules, log-probabilities, grammars, beside plain greedy rows.

    python -m bench.sampling_cost [--rows 1 16] [--vocab 49152] [--threads 1] [--device cpu] [--out FILE]

Random logits, no model: each figure is the median time of everything between the forward pass and the result on the
host, for a step in which every row asks for the same. All kinds are run in turn, round after round, and on a CPU it is
the processor time that counts, so that what else the machine does hardly shows; read the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch

from bench.provenance import provenance
from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.bit_masks import pack_ids
from services.gpu_worker.host_limits import keep_freed_memory
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Spans
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.step_work import RowOptions, StepMasks
from services.gpu_worker.uploads import upload
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model
from services.wire.columns import pack_float32, pack_int32
from services.wire.request_params import LogitRules, SamplingParams
from services.wire.steps import NewRow

CONTEXT = 512  # tokens that a row has, of which so many are different
NUM_DIFFERENT = 300
_GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, 0)


def _greedy(rules: LogitRules | None = None, num_logprobs: int = -1) -> SamplingParams:
    return SamplingParams(0.0, 1.0, 0, 0.0, 0, 0, rules=rules, num_logprobs=num_logprobs)


_IDS = range(0, 3000, 10)
_ALL_RULES = LogitRules(
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    min_tokens=10**6,
    stop_token_ids=pack_int32([2, 3]),
    bias_ids=pack_int32(_IDS),
    biases=pack_float32([1.0] * len(_IDS)),
    allowed_token_ids=pack_int32(range(0, 40_000, 2)),
    bad_word_counts=pack_int32([4] * 50),
    bad_word_ids=pack_int32(range(200)),
)
KINDS: dict[str, SamplingParams] = {
    "greedy": _GREEDY,
    "temperature": SamplingParams(1.0, 1.0, 0, 0.0, 1, 0),
    "temperature, top_p 0.9": SamplingParams(1.0, 0.9, 0, 0.0, 1, 0),
    "repetition penalty": _greedy(LogitRules(repetition_penalty=1.2)),
    "frequency and presence": _greedy(LogitRules(frequency_penalty=0.5, presence_penalty=0.5)),
    "300 biases": _greedy(LogitRules(bias_ids=_ALL_RULES.bias_ids, biases=_ALL_RULES.biases)),
    "min_tokens": _greedy(LogitRules(min_tokens=10**6, stop_token_ids=_ALL_RULES.stop_token_ids)),
    "50 bad words": _greedy(
        LogitRules(bad_word_counts=_ALL_RULES.bad_word_counts, bad_word_ids=_ALL_RULES.bad_word_ids)
    ),
    "allowed ids": _greedy(LogitRules(allowed_token_ids=_ALL_RULES.allowed_token_ids)),
    "all rules": _greedy(_ALL_RULES),
    "grammar mask": _GREEDY,
    "logprobs": _greedy(num_logprobs=0),
    "logprobs, 20 likeliest": _greedy(num_logprobs=20),
    "all rules, logprobs 20": _greedy(_ALL_RULES, num_logprobs=20),
}
WITH_MASK = {"grammar mask"}


class Kind:
    """Rows that all ask for the same, and a step of them as often as one likes."""

    def __init__(self, name: str, runner: ModelRunner, num_rows: int) -> None:
        self._runner = runner
        self._device = runner.kv_cache.keys.device
        vocab_size = runner.config.vocab_size
        self._options = RowOptions(num_rows, vocab_size, self._device)
        ids = np.arange(CONTEXT, dtype=np.int64) % NUM_DIFFERENT
        self._options.set_rows(
            [NewRow(row, bytes(16), 0, b"", CONTEXT // 2, b"", KINDS[name]) for row in range(num_rows)],
            [ids] * num_rows,
        )
        rows = np.arange(num_rows, dtype=np.int64)
        self._rows = rows
        self._spans = Spans(rows, rows, np.full_like(rows, CONTEXT), np.full_like(rows, CONTEXT + 1), rows)
        allowed = pack_ids(np.arange(0, vocab_size, 3), vocab_size)
        self._bits = np.repeat(allowed[None], num_rows, axis=0) if name in WITH_MASK else None
        self._num_steps = 0

    def step(self, logits: torch.Tensor) -> None:
        """All that follows a forward pass with these logits ([num_rows, vocab_size] float32; may be changed)."""
        positions = np.full_like(self._rows, CONTEXT + self._num_steps)
        self._num_steps += 1
        masks = None
        if self._bits is not None:
            masks = StepMasks(upload(self._rows, self._device), upload(self._bits, self._device))
        picks = Picks(self._rows, self._rows, self._rows, positions, positions - CONTEXT // 2)
        work = self._options.work(picks, self._spans, masks)
        output = self._options.run(work, self._runner, logits, logits)
        self._options.keep(work, output)
        output.to_host()


def new_runner(vocab_size: int, device: torch.device, folder: Path) -> ModelRunner:
    """The smallest model with so many ids; its passes are not run."""
    shape = Shape(vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_layers=1)
    model = load_model(open_model(write_checkpoint(folder / "model", "llama", shape)), device)
    config = model.config
    kv_shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return ModelRunner(config, model.weights, KvCache(kv_shape, 1, device), attention_for(device, torch.float32))


@torch.inference_mode()
def measure(runner: ModelRunner, num_rows: int, num_rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of a step of each kind."""
    device = runner.kv_cache.keys.device
    now_s = process_time if device.type == "cpu" else perf_counter
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_rows, runner.config.vocab_size, generator=generator) * 3).to(device)
    kinds = {name: Kind(name, runner, num_rows) for name in KINDS}
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for round_ in range(num_rounds + 2):
        for name, kind in kinds.items():
            own = logits.clone()
            wait()
            begin = now_s()
            kind.step(own)
            wait()
            if round_ >= 2:  # the first ones grow tables
                times[name].append(1000 * (now_s() - begin))
    return {name: median(values) for name, values in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the worker does
    device = torch.device(options.device)
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runner = new_runner(options.vocab, device, Path(folder))
        for num_rows in options.rows:
            print(f"\n{num_rows} rows of {options.vocab:,} ids, {options.threads} threads, {options.rounds} rounds")
            found = measure(
                runner, num_rows, options.rounds, torch.cuda.synchronize if device.type == "cuda" else _no_wait
            )
            for name, milliseconds in found.items():
                print(f"  {name:26s} {milliseconds:8.3f} ms {milliseconds / found['greedy']:7.2f} x greedy")
            results[f"{num_rows} rows"] = {name: round(milliseconds, 4) for name, milliseconds in found.items()}
    if options.out is not None:
        report = source | {"vocab_size": options.vocab, "threads": options.threads, "milliseconds": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _no_wait() -> None:
    """A CPU has run what it was told."""


if __name__ == "__main__":
    main()
