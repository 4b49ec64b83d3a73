"""What a worker's step costs beyond the forward pass, and what it would cost without the wishes that nobody has.

    python -m bench.step_cost [MODEL] [--rows 1 16 32] [--context 300] [--rounds 40] [--threads N]
        [--numerics fast] [--out FILE]

Rows decode on a real model, once greedily and once with temperature 0.7, top_p 0.9 and seeds. Each round runs three
things in turn: a whole step as the worker runs it, from the plan to the result; the same step with a table of rows that
knows of no penalties, bans, log-probabilities, grammars or pooling; and the bare forward pass with the inputs of that
step. The ratios compare medians of the same run; read them, not the milliseconds. On the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

import torch

from bench.provenance import provenance
from bench.step_options import laid_out_model, step_parser
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.kv_dtype import choose_kv_dtype
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Spans
from services.gpu_worker.proposals import Proposals
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.step_launcher import StepLauncher
from services.gpu_worker.step_work import RowOptions, StepMasks, StepOutput, StepWork
from services.gpu_worker.weights import RunnableModel
from services.gpu_worker.worker_state import WorkerState
from services.runtime.config import Settings
from services.wire.columns import pack_int32, unpack_int32
from services.wire.request_params import SamplingParams
from services.wire.steps import NewRow, StepPlan

SAMPLING: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda row: SamplingParams(0.0, 1.0, 0, 0.0, 0, 0),
    "temperature 0.7, top_p 0.9": lambda row: SamplingParams(0.7, 0.9, 0, 0.0, row + 1, 0),
}
_CPU = torch.device("cpu")
_PAGE_SIZE = 16
_WARM_UP_ROUNDS = 3


class RecordingRunner(ModelRunner):
    """Remembers the inputs of its newest pass."""

    newest: StepInputs

    def hidden(self, inputs: StepInputs) -> torch.Tensor:
        """See `ModelRunner.hidden`."""
        self.newest = inputs
        return super().hidden(inputs)


class PlainRows(RowOptions):
    """The tables of other rows, of which only the way to sample is looked at."""

    def __init__(self, options: RowOptions) -> None:
        self._sample = options._sample
        self._sampling = options._sampling

    def work(self, picks: Picks, spans: Spans, masks: StepMasks | None, proposals: Proposals | None = None) -> StepWork:
        """See `RowOptions.work`; the plans measured here propose nothing."""
        groups = self._sampling.groups(picks.rows, picks.positions, picks.logit_rows)
        return StepWork(picks, groups, None, None, None, None, None)

    def run(self, work: StepWork, runner: ModelRunner, hidden: torch.Tensor, logits: torch.Tensor) -> StepOutput:
        """See `RowOptions.run`."""
        return StepOutput(self._sample(logits, work.groups))

    def keep(self, work: StepWork, output: StepOutput) -> None:
        """See `RowOptions.keep`: nothing."""


@dataclass
class Times:
    """Milliseconds of each round."""

    whole: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)


class DecodingRows:
    """Rows of a worker that decode on and on."""

    def __init__(
        self,
        model: RunnableModel,
        num_rows: int,
        context: int,
        num_steps: int,
        sampling: str,
        numerics: str = "exact",
    ) -> None:
        config = model.config
        kv_dtype = choose_kv_dtype(Settings(numerics=numerics), _CPU, torch.float32, config.head_dim)
        num_pages = num_rows * -(-(context + num_steps) // _PAGE_SIZE)
        shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, kv_dtype)
        pool = KvCache(shape, num_pages, _CPU)
        attention = PagedCpuAttention(kv_dtype, computes_in=torch.float32)
        self.runner = RecordingRunner(config, model.weights, pool, attention, operators_for(_CPU))
        self.runner.record_layers(GraphLimits(num_rows, config.max_position_embeddings), lambda: None)
        sizes = WorkerSizes(num_rows, config.max_position_embeddings, config.vocab_size, _PAGE_SIZE, num_pages)
        self.state = WorkerState(sizes, _CPU)
        self._launcher = StepLauncher(self.runner, self.state)
        self._num_rows, self._length, self._num_steps = num_rows, context, 0
        of_row = num_pages // num_rows
        generator = torch.Generator().manual_seed(0)
        for row in range(num_rows):
            ids = torch.randint(100, config.vocab_size, (context,), generator=generator).tolist()
            pages = range(row * of_row, (row + 1) * of_row)
            new = NewRow(row, row.to_bytes(16), 0, pack_int32(ids), context, pack_int32(pages), SAMPLING[sampling](row))
            self._run(self._plan([row], 0, context, (new,)))

    def decode(self) -> float:
        """One token for each row, whatever comes; milliseconds from plan to result."""
        plan = self._plan(list(range(self._num_rows)), self._length, 1, ())
        self._length += 1
        return self._run(plan)

    def verify(self, num_proposals: int) -> float:
        """The same with so many proposals a row, none of which stands unless by chance it is right."""
        plan = self._plan(list(range(self._num_rows)), self._length, 1, ())
        plan = replace(
            plan,
            num_new_tokens=pack_int32([1 + num_proposals] * self._num_rows),
            proposal_counts=pack_int32([num_proposals] * self._num_rows),
            proposal_ids=pack_int32([0] * (num_proposals * self._num_rows)),
        )
        begin = perf_counter()
        result = self._launcher.finish(self._launcher.launch(plan))
        elapsed_ms = 1000 * (perf_counter() - begin)
        self._length += max(unpack_int32(result.counts))
        return elapsed_ms

    def forward(self) -> float:
        """The newest step's forward pass once more; milliseconds."""
        begin = perf_counter()
        self.runner.forward(self.runner.newest)
        return 1000 * (perf_counter() - begin)

    def _plan(self, rows: list[int], start: int, num_new: int, new_rows: tuple[NewRow, ...]) -> StepPlan:
        count = len(rows)
        step = self._num_steps
        self._num_steps += 1
        return StepPlan(
            epoch=1, step=step, released_rows=b"", new_rows=new_rows, page_rows=b"", page_counts=b"", page_ids=b"",
            rows=pack_int32(rows), start_positions=pack_int32([start] * count),
            num_new_tokens=pack_int32([num_new] * count), samples=bytes([1]) * count,
        )  # fmt: skip

    def _run(self, plan: StepPlan) -> float:
        begin = perf_counter()
        self._launcher.finish(self._launcher.launch(plan))
        return 1000 * (perf_counter() - begin)


def measure(rows: DecodingRows, num_rounds: int) -> Times:
    """So many rounds, and some before that do not count."""
    times = Times()
    all_wishes = rows.state.options
    plain = PlainRows(all_wishes)
    for round_ in range(num_rounds + _WARM_UP_ROUNDS):
        whole = rows.decode()
        rows.state.options = plain
        bare_of_wishes = rows.decode()
        rows.state.options = all_wishes
        forward = rows.forward()
        if round_ >= _WARM_UP_ROUNDS:
            times.whole.append(whole)
            times.plain.append(bare_of_wishes)
            times.forward.append(forward)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = step_parser(__doc__, rounds=40)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    options = parser.parse_args(arguments)
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    model, products = laid_out_model(options)
    results: dict[str, dict[str, float]] = {}
    print("\n| rows, sampling | step ms | without wishes ms | forward ms | step / without | step / forward |")
    print("|---|--:|--:|--:|--:|--:|")
    num_steps = 2 * (options.rounds + _WARM_UP_ROUNDS)
    for num_rows in options.rows:
        for sampling in SAMPLING:
            rows = DecodingRows(model, num_rows, options.context, num_steps, sampling, options.numerics)
            times = measure(rows, options.rounds)
            whole, plain, forward = median(times.whole), median(times.plain), median(times.forward)
            name = f"{num_rows}, {sampling}"
            print(
                f"| {name} | {whole:.2f} | {plain:.2f} | {forward:.2f} | {whole / plain:.3f} | {whole / forward:.3f} |"
            )
            results[name] = {
                "step_ms": round(whole, 3),
                "without_wishes_ms": round(plain, 3),
                "forward_ms": round(forward, 3),
            }
    if options.out is not None:
        report = source | {
            "context": options.context,
            "threads": options.threads,
            "products": products,
            "milliseconds": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
