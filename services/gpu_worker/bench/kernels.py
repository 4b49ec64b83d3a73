"""gpu_worker: times of single kernels beside what the machine can do. No weights are read, only the configuration."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import quantiles

import torch

from services.gpu_worker.bench.kernel_cases import (
    Case,
    Place,
    attention_cases,
    operator_cases,
    product_cases,
    sampling_cases,
)
from services.gpu_worker.bench.report import beside_limits, tell, tell_machine
from services.gpu_worker.choices import choose_dtype, product_dtype
from services.gpu_worker.host_limits import keep_freed_memory
from services.gpu_worker.machine_limits import machine_limits
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.process_set_up import choose_device, set_up_threads
from services.gpu_worker.roofline import measure_machine
from services.gpu_worker.start_up import device_name
from services.gpu_worker.timing import run_times_s
from services.gpu_worker.weights import default_dtype
from services.model_files.source import open_model
from services.runtime.config import Settings


@torch.inference_mode()
def bench_kernels(settings: Settings, arguments: Sequence[str]) -> None:
    """Measures and tells; raises what opening a model and choosing a device raise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    device = choose_device(settings)
    set_up_threads(settings, device)
    keep_freed_memory()
    config = parse_model_config(open_model(settings.model))
    place = Place(config, device, choose_dtype(settings) or default_dtype(config, device))
    tell_machine(measure_machine(device, device_name(device), product_dtype(settings, device, place.dtype)))
    for case in _cases(place, settings.page_size, options.rows, options.contexts):
        at = f", {case.context} tokens of context" if case.context else ""
        tell(now=f"{case.kernel}, {case.form}, {case.rows} rows{at}")
        times_s = run_times_s(device, case.run, options.seconds)
        first, middle, third = quantiles(times_s, n=4, method="inclusive")
        tell(
            row={
                "kernel": case.kernel,
                "form": case.form,
                "rows": case.rows,
                "context": case.context,
                "us": 1e6 * middle,
                "us_least": 1e6 * min(times_s),
                "us_quartiles": (1e6 * first, 1e6 * third),
                **beside_limits(middle, case.num_bytes, case.num_operations, machine_limits(device, case.dtype)),
            }
        )


def _cases(place: Place, page_size: int, rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    return chain(
        product_cases(place, rows),
        attention_cases(place, page_size, rows, contexts),
        operator_cases(place, rows),
        sampling_cases(place, rows),
    )
