"""`python -m services.launcher`: the same as the command `tokenway`."""

from __future__ import annotations

import sys

from services.launcher.cli import main

sys.exit(main())
