"""Where a measurement of the worker begins; see the package."""

from __future__ import annotations

import sys

from services.gpu_worker.bench.report import BenchError, logs_told, tell
from services.model_files.errors import ModelFileError
from services.runtime.config import Settings, SettingsError, load_settings
from services.runtime.service import StartError


def main(arguments: list[str]) -> int:
    """Measures what is named first; status 1 when it cannot."""
    try:
        settings = load_settings([])
        with logs_told():
            _measure(settings, *arguments)
    except (SettingsError, StartError, ModelFileError, BenchError) as error:
        tell(error=str(error))
        return 1
    tell(done=True)
    return 0


def _measure(settings: Settings, what: str, *options: str) -> None:
    if what == "kernels":
        from services.gpu_worker.bench.kernels import bench_kernels

        bench_kernels(settings, options)
    else:
        from services.gpu_worker.bench.engine import bench_engine

        bench_engine(settings, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
