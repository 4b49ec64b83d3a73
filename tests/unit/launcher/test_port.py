"""The reservation of the port: nobody else's launcher gets it, our tokenizers do."""

from __future__ import annotations

import socket

import pytest

from services.launcher.port import reserve_port
from services.runtime.service import StartError


def _tokenizer_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(64)
    return listener


def test_prc_06_a_reserved_port_is_refused_to_another_launcher_before_anything_listens() -> None:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StartError, match=f"port {port} on {host} is in use"):
                reserve_port(host, port)


def test_prc_06_a_port_that_tokenizers_share_is_refused_though_they_set_so_reuseport() -> None:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        first, second = _tokenizer_socket("127.0.0.1", port), _tokenizer_socket("127.0.0.1", port)
    with first, second, pytest.raises(StartError, match=f"port {port}"):
        reserve_port("127.0.0.1", port)


def test_every_connection_reaches_a_tokenizer_although_the_port_is_reserved() -> None:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with _tokenizer_socket("127.0.0.1", port) as first, _tokenizer_socket("127.0.0.1", port) as second:
            clients = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
            num_accepted = 0
            for listener in (first, second):
                listener.setblocking(False)
                while True:
                    try:
                        listener.accept()[0].close()
                    except BlockingIOError:
                        break
                    num_accepted += 1
            for client in clients:
                client.close()
            assert num_accepted == 40


def test_a_port_can_be_reserved_again_while_closed_connections_linger_on_it() -> None:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with _tokenizer_socket("127.0.0.1", port) as listener:
            client = socket.create_connection(("127.0.0.1", port), timeout=5)
            served, _ = listener.accept()
            served.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
            client.close()
    reserve_port("127.0.0.1", port).close()


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        reserve_port("192.0.2.1", 0)


def test_an_unknown_host_is_refused_by_name() -> None:
    with pytest.raises(StartError, match=r"--host no such host"):
        reserve_port("no such host", 0)
