"""What a command refuses to go on with."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what was asked; the message is one line that says why and what would help."""


class ModelNotFoundError(CommandError):
    """A model's name leads to no usable files; one line that says what would."""


class HubUnreachableError(ModelNotFoundError):
    """Whether it would, nobody can tell without a network."""
