"""What a step costs that verifies proposals, beside one that does not: what speculation must win.

    python -m bench.verify_cost [MODEL] [--proposals 1 3 7 15] [--context 300] [--rounds 20] [--threads N]
        [--numerics fast] [--out FILE]

One greedy row decodes on a real model. Each round runs a plain step and one with so many proposals in turn. The ratio,
of the medians, is how many ids a step with proposals must bring to be no loss: the row's own and those that stand.
On the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from bench.provenance import provenance
from bench.step_cost import DecodingRows
from bench.step_options import laid_out_model, step_parser
from services.gpu_worker.weights import RunnableModel

_WARM_UP_ROUNDS = 3


def measure(
    model: RunnableModel, context: int, num_rounds: int, num_proposals: int, numerics: str = "exact"
) -> tuple[float, float]:
    """Milliseconds of a plain step and of one with proposals: medians."""
    num_all = num_rounds + _WARM_UP_ROUNDS
    rows = DecodingRows(model, 1, context, num_all * (num_proposals + 2), "greedy", numerics)
    pairs = [(rows.decode(), rows.verify(num_proposals)) for _ in range(num_all)][_WARM_UP_ROUNDS:]
    return median(plain for plain, _ in pairs), median(verified for _, verified in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = step_parser(__doc__, rounds=20)
    parser.add_argument("--proposals", type=int, nargs="+", default=[1, 3, 7, 15])
    options = parser.parse_args(arguments)
    source = provenance()
    for key, value in source.items():
        print(f"{key}: {value}")
    model, products = laid_out_model(options)
    print("\n| proposals | plain step ms | with proposals ms | ratio |")
    print("|--:|--:|--:|--:|")
    results: dict[str, dict[str, float]] = {}
    for num_proposals in options.proposals:
        plain, verified = measure(model, options.context, options.rounds, num_proposals, options.numerics)
        print(f"| {num_proposals} | {plain:.2f} | {verified:.2f} | {verified / plain:.2f} |", flush=True)
        results[str(num_proposals)] = {"plain_ms": round(plain, 3), "verify_ms": round(verified, 3)}
    if options.out is not None:
        report = source | {"context": options.context, "threads": options.threads, "products": products}
        report["milliseconds"] = results
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
