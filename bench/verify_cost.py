"""What a step costs that verifies proposals, beside one that does not: what speculation must win.

    python -m bench.verify_cost [MODEL] [--proposals 1 3 7 15] [--context 300] [--rounds 20] [--threads N]
        [--numerics fast] [--out FILE]

One greedy row decodes on a real model. Each round runs a plain step and one with so many proposals in turn. The ratio,
of the medians, is how many ids a step with proposals must bring to be no loss: the row's own and those that stand.
On the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from bench.provenance import provenance
from bench.step_cost import DecodingRows
from services.gpu_worker.host_limits import keep_freed_memory, num_cores
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.weights import RunnableModel, load_laid_out
from services.launcher.models import resolve_model
from services.model_files.source import open_model
from services.runtime.config import Settings

_WARM_UP_ROUNDS = 3


def measure(model: RunnableModel, context: int, num_rounds: int, num_proposals: int) -> tuple[float, float]:
    """Milliseconds of a plain step and of one with proposals: medians."""
    num_all = num_rounds + _WARM_UP_ROUNDS
    rows = DecodingRows(model, 1, context, num_all * (num_proposals + 2), "greedy")
    pairs = [(rows.decode(), rows.verify(num_proposals)) for _ in range(num_all)][_WARM_UP_ROUNDS:]
    return median(plain for plain, _ in pairs), median(verified for _, verified in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default=Settings().model)
    parser.add_argument("--proposals", type=int, nargs="+", default=[1, 3, 7, 15])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--numerics", choices=("exact", "fast"), default=Settings().numerics)
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the worker does
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    forms = CpuForms(options.numerics == "exact")
    model = load_laid_out(open_model(resolve_model(options.model, Settings()).path), forms)
    print(f"numerics {options.numerics}: {forms.description}; {options.threads} threads")
    print("\n| proposals | plain step ms | with proposals ms | ratio |")
    print("|--:|--:|--:|--:|")
    results: dict[str, dict[str, float]] = {}
    for num_proposals in options.proposals:
        plain, verified = measure(model, options.context, options.rounds, num_proposals)
        print(f"| {num_proposals} | {plain:.2f} | {verified:.2f} | {verified / plain:.2f} |", flush=True)
        results[str(num_proposals)] = {"plain_ms": round(plain, 3), "verify_ms": round(verified, 3)}
    if options.out is not None:
        report = source | {"context": options.context, "threads": options.threads, "products": forms.description}
        report["milliseconds"] = results
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
