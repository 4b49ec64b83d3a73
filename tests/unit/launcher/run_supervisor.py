"""A process that supervises the children described on its command line; the tests watch it from outside.

python run_supervisor.py '[{"name": "a", "code": "print(1)", "stop_order": 0, "kind": ""}]' FIRST_S LATER_S
"""

from __future__ import annotations

import json
import os
import signal
import sys

from services.launcher.child import ChildSpec
from services.launcher.progress import SilentStartup
from services.launcher.supervisor import Stop, Supervisor

if __name__ == "__main__":
    specs = [
        ChildSpec(
            entry["name"], (sys.executable, "-u", "-c", entry["code"]), os.environ, entry["stop_order"], entry["kind"]
        )
        for entry in json.loads(sys.argv[1])
    ]
    drain = Stop(signal.SIGTERM, float(sys.argv[2]), float(sys.argv[3]))
    sys.exit(Supervisor(specs, SilentStartup("test"), drain).run())
