"""A child that prints what its arguments say: what commands that follow one must take."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    for line in sys.argv[1:]:
        if line == "!":
            print("it fell\nover", file=sys.stderr)
            sys.exit(3)
        print(line, flush=True)
