"""A peer process for fault tests: `python -m tests.faults.wire_peer echo|count ENDPOINT NAME`.

echo binds ENDPOINT and sends every message back. count connects to it, says Goodbye(0), and prints the epoch of every
Goodbye that arrives, a line each; it ends at the end of its standard input.
"""

from __future__ import annotations

import sys
import threading

import zmq

from services.wire.members import Goodbye
from services.wire.transport import BlockingReceiver, DealerPort, RouterPort


def echo(endpoint: str) -> None:
    port = RouterPort(zmq.Context(), endpoint)
    receiver = BlockingReceiver([port])
    print("ready", flush=True)
    while True:
        for _, envelope in receiver.receive_batch(600):
            port.send(envelope.peer, envelope.message)


def count(endpoint: str, name: str) -> None:
    port = DealerPort(zmq.Context(), endpoint, name.encode())
    receiver = BlockingReceiver([port])
    port.send(Goodbye(0))

    def interrupt_at_the_end_of_input() -> None:
        sys.stdin.read()
        receiver.interrupt()

    threading.Thread(target=interrupt_at_the_end_of_input, daemon=True).start()
    print("ready", flush=True)
    while True:
        batch = receiver.receive_batch(600)
        if not batch:
            return
        for _, envelope in batch:
            if isinstance(envelope.message, Goodbye):
                print(envelope.message.epoch, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        echo(sys.argv[2])
    else:
        count(sys.argv[2], sys.argv[3])
