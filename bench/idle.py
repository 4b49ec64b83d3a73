"""What a server costs that nobody uses, and how it ends.

    python -m bench.idle [MODEL] [--seconds 10]

Starts a server, lets it answer once, waits until it has settled and says how much processor time each of its processes
used, per minute. Then Ctrl-C: how long until the last process was gone, and whether anything was left behind
(processes, the run directory, the port). Ends with status 1 if something was, or if it took more than 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.own_server import OwnServer
from bench.process_times import cpu_seconds
from bench.provenance import provenance
from services.launcher.bench.summary import markdown_table

_SETTLING_S = 3.0
_MOST_STOP_S = 5.0


def ask_once(url: str) -> None:
    """One short answer."""
    body = json.dumps({"prompt": "1, 2, 3, 4,", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def idle_seconds(processes: dict[str, psutil.Process], duration_s: float) -> dict[str, float]:
    """Processor seconds of each process while nothing is asked, per minute."""
    before = {name: cpu_seconds(process.pid) for name, process in processes.items()}
    started_s = time.monotonic()
    time.sleep(duration_s)
    minutes = (time.monotonic() - started_s) / 60
    return {name: (cpu_seconds(process.pid) - before[name]) / minutes for name, process in processes.items()}


def leftovers(processes: dict[str, psutil.Process], url: str, directory: Path) -> list[str]:
    """What is still there of a server that has ended."""
    left = [f"process {name}" for name, process in processes.items() if process.is_running()]
    left += [f"{path}" for path in directory.iterdir()]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", urlsplit(url).port))
        except OSError as error:
            left.append(f"the port: {error}")
    return left


def main() -> int:
    """Runs the measurement; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # the run directory is made here, so that nothing else is looked at
        server = OwnServer(options.model)
        ask_once(server.url)
        time.sleep(_SETTLING_S)
        processes = server.processes
        used = idle_seconds(processes, options.seconds)
        started_s = time.monotonic()
        status = server.stop()
        psutil.wait_procs(processes.values(), timeout=30)
        stop_s = time.monotonic() - started_s
        left = leftovers(processes, server.url, Path(directory))
    print(json.dumps(provenance(), indent=2))
    rows = [[name, f"{seconds:.3f}"] for name, seconds in [*used.items(), ("all", sum(used.values()))]]
    print(markdown_table(["process", "CPU s per minute, idle"], rows))
    print(f"Ctrl-C: gone after {stop_s:.2f} s with status {status}; left behind: {', '.join(left) or 'nothing'}")
    return 0 if not left and stop_s <= _MOST_STOP_S else 1


if __name__ == "__main__":
    sys.exit(main())
