"""Tokenizer process: the certificate for HTTPS, checked before anything slow is done."""

from __future__ import annotations

import ssl
from typing import NoReturn

from services.runtime.config import Settings
from services.runtime.service import StartError


def encryption_of(settings: Settings) -> ssl.SSLContext | None:
    """What connections are encrypted with, at least TLS 1.2; None for plain HTTP.

    Raises:
        StartError: only one of the two files is set, or they cannot be used; names the file.
    """
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise StartError("--tls-cert and --tls-key go together")
    for flag, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise StartError(f"{flag} {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "not a PEM file").lower().replace("_", " ")
        raise StartError(f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}: {reason}") from error
    return context


def _no_password() -> NoReturn:
    raise StartError("--tls-key: the key is encrypted; a server has nobody to ask for its password")
