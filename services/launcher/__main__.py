"""Where the command `tokenway` begins; `python -m services.launcher` is the same.

The launcher's modules take half a second to load. This one loads none of them before it has seen to it that Ctrl-C in
that time ends the command as it does later: with status 130 and without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_EXIT_INTERRUPTED = 130


def main() -> int:
    """Runs the command line; returns the exit status, see `cli.main`."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
    from services.launcher import cli

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process while it holds nothing that would have to be given back."""
    os._exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
