"""Tokenizer process: who may ask for what: keys, and which routes need one.

Deny by default: a route that says nothing of its audience needs a key, and so does a path that leads nowhere. Owns the
hashes of the keys; must never keep, log or show a key: from here on a caller is a tenant, a short name made of its
key's hash. What comes over the control listener is the operator's: the socket's directory is private.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aiohttp import web

from services.runtime.config import Settings, values_of
from services.runtime.service import StartError
from services.tokenizer.api_error import ApiError, Code

DEFAULT_TENANT = "default"
OPERATOR = "operator"
_CALLER = "caller"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_TENANT_DIGITS = 12


class Audience(StrEnum):
    """Whom a route is for."""

    ANYONE = "anyone"  # whether the server lives: no key
    METRICS = "metrics"  # a key, unless --metrics-open
    CLIENT = "client"  # a key, if there are any
    CONTROL = "control"  # the operator


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        tenant: A name for the key; "default" where there are no keys.
        is_known: Whether it may see more than a status: it has sent a good key, or none is needed.
        is_operator: Whether it came over the control listener or sent the admin key.
    """

    tenant: str
    is_known: bool = True
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """What `Access` needs to know; made by `read_access_settings`."""

    keys: tuple[str, ...] = ()
    admin_key: str = ""
    is_admin_on_public: bool = False
    are_metrics_open: bool = False


class Access:
    """Decides on each request by its headers and the listener that it came over."""

    def __init__(self, settings: AccessSettings) -> None:
        self._tenants = {_digest(key): tenant_of(key) for key in settings.keys}
        self._admin = _digest(settings.admin_key) if settings.admin_key else b""
        self._is_admin_on_public = settings.is_admin_on_public
        self._are_metrics_open = settings.are_metrics_open

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._tenants)

    def admit(self, request: web.BaseRequest, audience: Audience, *, is_control: bool) -> Caller:
        """Who asks; afterwards `caller_of(request)` tells it too.

        Args:
            request: Its head.
            audience: Whom the route is for; CLIENT for a path that leads nowhere.
            is_control: Whether it came over the control listener.

        Raises:
            ApiError: 401 without a good key, 404 for a control route on the public port.
        """
        caller = self._caller(request, is_control)
        request[_CALLER] = caller
        if audience is Audience.CONTROL and not is_control and not self._is_admin_on_public:
            if not caller.is_known:
                raise _unauthorized()
            raise not_found(request)
        if not self._is_good_enough(caller, audience):
            raise _unauthorized()
        return caller

    def _is_good_enough(self, caller: Caller, audience: Audience) -> bool:
        match audience:
            case Audience.ANYONE:
                return True
            case Audience.METRICS:
                return self._are_metrics_open or caller.is_known
            case Audience.CLIENT:
                return caller.is_known
            case Audience.CONTROL:
                return caller.is_operator

    def _caller(self, request: web.BaseRequest, is_control: bool) -> Caller:
        if is_control and not _is_tcp(request):
            return Caller(OPERATOR, is_operator=True)
        for key in _keys_sent(request.headers.getall("Authorization", []), request.headers.getall("x-api-key", [])):
            digest = _digest(key)
            if self._admin and hmac.compare_digest(digest, self._admin):
                return Caller(OPERATOR, is_operator=True)
            tenant = self._tenant(digest)
            if tenant:
                return Caller(tenant)
        if self._tenants or is_control:
            return Caller("", is_known=False)
        return Caller(DEFAULT_TENANT)

    def _tenant(self, digest: bytes) -> str:
        """Looks at every key, so that the time tells nothing of which one it was."""
        found = ""
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def caller_of(request: web.BaseRequest) -> Caller:
    """Who asks, once the request was admitted."""
    caller = request[_CALLER]
    assert isinstance(caller, Caller)
    return caller


def not_found(request: web.BaseRequest) -> ApiError:
    """What is said of a path that leads nowhere, or not for everybody."""
    path = request.rel_url.raw_path or request.raw_path
    shown = "".join(c if c.isascii() and (c.isalnum() or c in "/-._~:%*") else "?" for c in path[:256])
    return ApiError(404, f"there is no {shown} here", code=Code.NOT_FOUND)


def tenant_of(key: str) -> str:
    """A name for whoever has a key; the key cannot be found from it."""
    return "key-" + hashlib.sha256(b"tenant\0" + _bytes(key)).hexdigest()[:_TENANT_DIGITS]


def read_access_settings(settings: Settings) -> AccessSettings:
    """The keys from flags, variables and files.

    Raises:
        StartError: a file cannot be read or holds no key, or a setting needs an admin key that is not there.
    """
    keys = [*values_of(settings.api_key), *_lines_of("--api-key-file", settings.api_key_file)]
    admin_key = settings.admin_key or next(iter(_lines_of("--admin-key-file", settings.admin_key_file)), "")
    for flag, is_set in (("--admin-on-public", settings.admin_on_public), ("--control-port", settings.control_port)):
        if is_set and not admin_key:
            raise StartError(f"{flag} needs --admin-key or --admin-key-file")
    if admin_key in keys:
        raise StartError("the admin key is one of the clients' keys too; choose another")
    return AccessSettings(tuple(dict.fromkeys(keys)), admin_key, settings.admin_on_public, settings.metrics_open)


def warning_of(settings: Settings, access: AccessSettings) -> str:
    """What should be said at the start about the way that this server is reached; "" when nothing should."""
    is_public = settings.host not in _LOOPBACK
    if is_public and access.keys and not settings.tls_cert:
        return f"keys are sent in the clear to {settings.host or 'all addresses'}: set --tls-cert, or put TLS in front"
    if is_public and not access.keys:
        return (
            f"anybody who reaches {settings.host or 'any address'} is served: set --api-key, or keep the port private"
        )
    return ""


def _keys_sent(authorization: Sequence[str], x_api_key: Sequence[str]) -> Iterator[str]:
    for value in authorization:
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            yield key.strip()
    for value in x_api_key:
        if value.strip():
            yield value.strip()


def _unauthorized() -> ApiError:
    """The same for a wrong key and for none."""
    message = "a valid API key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
    return ApiError(401, message, code=Code.INVALID_API_KEY)


def _lines_of(flag: str, path: str) -> Iterable[str]:
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise StartError(f"{flag} {path}: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise StartError(f"{flag} {path}: holds no key")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(_bytes(key)).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # how header bytes that are no UTF-8 come


def _is_tcp(request: web.BaseRequest) -> bool:
    return isinstance(request.transport.get_extra_info("peername") if request.transport else None, tuple)
