"""What the parsers of all commands have in common: errors in one line, an example in the help, no abbreviated flags."""

from __future__ import annotations

from services.runtime.config import FlagParser


def command_parser(name: str, description: str, example: str, more: str = "", usage: str | None = None) -> FlagParser:
    """A parser without flags.

    Args:
        name: of the command, as typed behind `tokenway`.
        description: what it does.
        example: one line that can be typed.
        more: what is said behind the example.
        usage: in place of the one that is made from the flags.
    """
    return FlagParser(
        prog=f"tokenway {name}",
        usage=usage,
        description=description,
        epilog=f"Example: {example}{more}",
        allow_abbrev=False,
    )
