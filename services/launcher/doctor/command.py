"""`tokenway doctor`: runs the checks one after the other and shows each as soon as it is done."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from services.launcher.child_questions import ask_child
from services.launcher.command_parser import command_parser
from services.launcher.doctor.findings import Finding, as_json, failed, has_failed, lines_of
from services.launcher.doctor.machine_checks import (
    check_device,
    check_disk,
    check_open_files,
    check_packages,
    check_python,
)
from services.launcher.doctor.model_checks import FIT_CHECK, check_model
from services.launcher.doctor.place_checks import check_port, check_run_directory, check_running, check_scheduler
from services.launcher.errors import CommandError
from services.launcher.models import models_directory
from services.launcher.terminal import Terminal
from services.runtime.config import Settings, load_settings


def parser() -> argparse.ArgumentParser:
    """The command line, less the settings of a server, which are taken too."""
    made = command_parser(
        "doctor",
        "Checks this machine, a model (whether it will fit, before it is downloaded too), the port, the run directory "
        "and the scheduler that a server would meet, and says how to mend what is wrong.",
        "tokenway doctor qwen3:8b --device cuda",
        ". Status: 0 when a server would start, 1 when not.",
        usage="tokenway doctor [-h] [--json] [MODEL] [settings of `tokenway serve`]",
    )
    made.add_argument("--json", action="store_true", help="print the findings as JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Checks and shows; the exit status."""
    options, rest = parser().parse_known_args(arguments)
    settings = load_settings(rest)
    terminal, progress = Terminal(), Terminal(sys.stderr)
    findings: list[Finding] = []
    progress.status("looking around")
    for finding in _checks(settings):
        findings.append(finding)
        progress.clear_status()
        if not options.json:
            for line in lines_of(finding, terminal):
                terminal.line(line)
        progress.status("checking")
    progress.clear_status()
    if options.json:
        print(json.dumps(as_json(findings), ensure_ascii=False, indent=2))
    return 1 if has_failed(findings) else 0


def _checks(settings: Settings) -> Iterator[Finding]:
    yield check_python()
    packages = check_packages()
    yield packages
    yield check_open_files()
    yield check_disk(models_directory(settings))
    yield check_port(settings)
    yield check_run_directory(settings)
    yield from check_running()
    if settings.scheduler_endpoint:
        yield check_scheduler(settings.scheduler_endpoint)
    if not has_failed([packages]):
        yield from _device(settings)
        yield from check_model(settings)


def _device(settings: Settings) -> Iterator[Finding]:
    try:
        machine = ask_child(FIT_CHECK, settings, ["--machine-only"])["machine"]
    except CommandError as error:
        yield failed("device", str(error), "mend --device, or the installation of torch")
        return
    yield from check_device(machine, wants_gpu=settings.device != "cpu")
