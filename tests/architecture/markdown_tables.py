"""Tables in Markdown documents, for the tests that hold them against the code."""

from __future__ import annotations

import re


def table_after(text: str, header: str) -> list[list[str]]:
    """The cells of the rows of the table that begins with this header line."""
    lines = text.split(f"{header}\n", 1)[1].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows
