"""What can go wrong between two processes."""

from __future__ import annotations


class WireError(Exception):
    """Anything the wire refuses."""


class ProtocolError(WireError):
    """A frame that is not one of our messages: unknown tag, wrong arity or type, over a limit. The sender's fault."""


class EndpointInUseError(WireError):
    """Another process holds the endpoint that this one was told to bind."""
