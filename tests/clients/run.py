"""Starts a server with the demo model and runs the clients' tests against it, in the clients' own environment.

python -m tests.clients.run --python .venv-clients/bin/python [pytest's options]
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from tests.integration.server import running

FOLDER = Path(__file__).parent
MODEL_NAME = "smollm2"


def main() -> int:
    """Returns pytest's status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", default=".venv-clients/bin/python")
    arguments, options = parser.parse_known_args()
    tests = [option for option in options if not option.startswith("-")] or [str(FOLDER)]
    flags = [option for option in options if option.startswith("-")]
    with running("smollm2:135m", served_model_name=MODEL_NAME, kv_cache_tokens=8192) as server:
        # Fixtures of the other tests need what the clients' environment does not have.
        only_here = ["-c", str(FOLDER / "pytest.ini"), f"--confcutdir={FOLDER}"]
        command = [arguments.python, "-m", "pytest", *only_here, *flags, *tests]
        variables = {"TOKENWAY_CLIENTS_URL": server.url, "TOKENWAY_CLIENTS_MODEL": MODEL_NAME}
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
