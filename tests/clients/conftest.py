"""Where the server is that the clients talk to. Without one these tests are not collected: `make test-clients`."""

from __future__ import annotations

import os

import pytest

URL = os.environ.get("TOKENWAY_CLIENTS_URL", "")
MODEL = os.environ.get("TOKENWAY_CLIENTS_MODEL", "")
collect_ignore_glob = [] if URL else ["test_*.py"]


@pytest.fixture(scope="session")
def url() -> str:
    """The server, without /v1."""
    return URL


@pytest.fixture(scope="session")
def model() -> str:
    """The served model."""
    return MODEL
