"""Tokenizer process: whether spans can be sent at all; apart from `span_export`, whose packages are optional."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from services.runtime.service import StartError

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_export(endpoint: str) -> None:
    """Refuses an endpoint that cannot be used, before anything slow is done.

    Raises:
        StartError: it is no address, or the optional packages are not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"--otlp-endpoint {endpoint}: write it as http://HOST:4318")
    for name in _NEEDED:
        if not is_installed(name):
            raise StartError("--otlp-endpoint needs OpenTelemetry: pip install 'tokenway[otel]'")


def is_installed(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
