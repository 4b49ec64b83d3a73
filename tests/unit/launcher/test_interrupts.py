"""Ctrl-C at any time ends the command with status 130 and without a traceback, from its first module on."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]

# The command as its script starts it; the signal comes when the named module is about to be loaded.
_INTERRUPTED_IMPORT = """
import os, signal, sys
from {module} import {function}

class Interrupt:
    def find_spec(self, name, *rest):
        if name == imported:
            os.kill(os.getpid(), signal.SIGINT)
            print("it went on")

imported = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
sys.exit({function}())
"""


def _entry() -> tuple[str, str]:
    scripts = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["tokenway"].partition(":")
    return module, function


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        ("serve", "services.launcher.cli"),
        ("serve", "argparse"),
        ("serve", "prometheus_client"),
        ("serve", "services.launcher.port"),
        ("chat", "services.launcher.chat.session"),
        ("bench", "asyncio"),
        ("models", "services.model_files.source"),
    ],
)
def test_prc_03_ctrl_c_while_the_launcher_loads_its_modules_leaves_no_traceback(command: str, imported: str) -> None:
    module, function = _entry()
    result = _run(_INTERRUPTED_IMPORT.format(module=module, function=function), imported, command)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_what_is_loaded_before_ctrl_c_is_seen_to_is_of_the_standard_library() -> None:
    script = f"import sys; before = set(sys.modules); import {_entry()[0]}; print(*sys.modules.keys() - before)"
    loaded = {name for name in _run(script).stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"services", "services.launcher", "services.launcher.__main__"}


def test_ctrl_c_stays_ignored_in_a_background_job() -> None:
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.argv = ['tokenway', '--help']\n"
        f"from {_entry()[0]} import main\n"
        "try: main()\n"
        "finally: print('ignored:', signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert _run(script).stdout.splitlines()[-1] == "ignored: True"
