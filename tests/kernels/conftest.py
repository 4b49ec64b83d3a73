"""These run through Triton's interpreter, beside an older numpy (`make test-kernels`); elsewhere none is found."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
