"""What the launcher refuses to start with."""

from __future__ import annotations

from services.runtime.service import StartError


class ModelNotFoundError(StartError):
    """A model's name leads to no usable files; one line that says what would."""
