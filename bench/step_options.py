"""What the benches of a worker's steps are told, and the model that they load."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from services.gpu_worker.host_limits import keep_freed_memory, num_cores
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.weights import RunnableModel, load_laid_out
from services.launcher.models import resolve_model
from services.model_files.source import open_model
from services.runtime.config import Settings


def step_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that they share; `rounds` is the default."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=Settings().model)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--numerics", choices=("exact", "fast"), default=Settings().numerics)
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    return parser


def laid_out_model(options: argparse.Namespace) -> tuple[RunnableModel, str]:
    """Loads the model as a worker does, prints in what forms, and returns both."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    forms = CpuForms(options.numerics == "exact")
    model = load_laid_out(open_model(resolve_model(options.model, Settings()).path), forms)
    print(f"numerics {options.numerics}: {forms.description}; {options.threads} threads")
    return model, forms.description
