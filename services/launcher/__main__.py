"""Where the command `tokenway` begins; `python -m services.launcher` is the same.

A command's modules take up to half a second to load. This one loads none of them before it has seen to it that Ctrl-C
in that time ends the command as it does later: with status 130 and without a traceback.
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
        return cli.main(on_loaded=_hear if is_heard else lambda: None)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)


def _hear() -> None:
    """From now on Ctrl-C is an exception, which gives back what the process holds."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process while it holds nothing that would have to be given back."""
    os._exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
