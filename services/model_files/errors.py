"""The one error that a broken or unsupported model directory or file gives."""

from __future__ import annotations

from pathlib import Path

from services.runtime.logs import escaped


class ModelFileError(ValueError):
    """A model's file is missing, damaged or of a kind that is not supported.

    The message is one line and names the file and, where there is one, the field: it is what the operator sees when a
    process refuses to start. The fault is the operator's or the file's, never a client's.
    """

    def __init__(self, path: Path, problem: str) -> None:
        """Join the file's path and the problem into one line, whatever a damaged file has put into a name."""
        self.path = path
        self.problem = escaped(problem)
        super().__init__(f"{escaped(str(path))}: {self.problem}")
