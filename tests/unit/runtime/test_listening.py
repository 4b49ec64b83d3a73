"""Addresses to listen on: looked up once, bound with the owner's options, refused in words that name them."""

from __future__ import annotations

import re
import socket

import pytest

from services.runtime.listening import REUSED, SHARED, ListenAddress, listen_addresses
from services.runtime.service import StartError


def test_no_host_means_every_family_once() -> None:
    addresses = listen_addresses("", 0)
    assert len({address.family for address in addresses}) == len(addresses) >= 1
    assert {address.address[0] for address in addresses} <= {"0.0.0.0", "::"}


@pytest.mark.parametrize("host", ["no such host", "no.such.host.invalid", "x" * 300, "主机"])
def test_an_unknown_host_is_named_in_one_line(host: str) -> None:
    with pytest.raises(StartError, match=re.escape(f"--host {host}: ")) as caught:
        listen_addresses(host, 0)
    assert "\n" not in str(caught.value)


def test_another_port_of_the_same_address() -> None:
    (address,) = listen_addresses("127.0.0.1", 0)
    assert address.port == 0
    assert address.with_port(81) == ListenAddress("127.0.0.1", socket.AF_INET, ("127.0.0.1", 81))
    assert address.with_port(81).port == 81


def test_prc_06_a_bound_port_is_refused_by_name_unless_both_share_it() -> None:
    (free,) = listen_addresses("127.0.0.1", 0)
    with free.bind([SHARED]) as first:
        taken = free.with_port(first.getsockname()[1])
        with taken.bind([REUSED, SHARED]) as second:
            assert second.getsockname() == first.getsockname()
        with pytest.raises(StartError) as caught:
            taken.bind([REUSED])
    words = f"port {taken.port} on 127.0.0.1 is in use by another process; choose one with --port"
    assert str(caught.value) == words


def test_the_options_are_set() -> None:
    with listen_addresses("127.0.0.1", 0)[0].bind([REUSED, SHARED]) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) != 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) != 0


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1 port 0: "):
        listen_addresses("192.0.2.1", 0)[0].bind([])
