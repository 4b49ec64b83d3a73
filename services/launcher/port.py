"""The port's reservation: taken before anything slow, held while the group runs.

Tokenizers share the port through SO_REUSEPORT, so they would also join the tokenizers of another server without an
error. A socket bound without that option is refused when anybody has the port; given the option afterwards it lets the
tokenizers in and keeps every later launcher out. It never listens, so no connection ever reaches it.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack

from services.runtime.listening import REUSED, SHARED, listen_addresses


def reserve_port(host: str, port: int) -> socket.socket:
    """Binds a port so that only this user's processes that set SO_REUSEPORT can bind it too.

    Args:
        host: address or name to listen on; of a name with several addresses the first one counts.
        port: 0 for a free one; `getsockname()[1]` tells which.

    Raises:
        StartError: the port is taken, may not be used, or the host is none of this machine.
    """
    reserved = listen_addresses(host, port)[0].bind([REUSED])
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    reserved.setsockopt(*SHARED)
    return reserved


def free_ports(count: int) -> list[int]:
    """Ports of this host alone that nobody has now; who binds one does so soon, and may find it taken."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
