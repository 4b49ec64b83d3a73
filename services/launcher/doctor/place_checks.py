"""Where a server would live: its port, its run directory, the processes that it would meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from services.launcher.doctor.findings import Finding, failed, ok, warning
from services.launcher.http.client import Client, KeyWantedError
from services.launcher.http.response import ResponseError
from services.launcher.http.server_address import ServerAddress
from services.launcher.port import reserve_port
from services.launcher.progress import local_url
from services.launcher.run_directory import run_directories, run_directory_base
from services.runtime.config import Settings
from services.runtime.health import unhealthy_reason
from services.runtime.service import StartError
from services.wire.codec import decode, encode
from services.wire.endpoints import Identity, ipc_endpoint, is_ipc, new_instance_name
from services.wire.errors import EndpointInUseError, ProtocolError
from services.wire.members import HandshakeRefused, Hello, Role, State
from services.wire.messages import PROTOCOL_VERSION

_LONGEST_SOCKET = "detokenizer-00"
_NAME_LENGTH = len("tokenway-00000000")
_ANSWER_TIMEOUT_S = 5.0
_NO_VERSION = 0  # of a greeting that only asks: every scheduler refuses it and says what it speaks


def check_port(settings: Settings) -> Finding:
    """Whether the port can be had, or who has it."""
    place = f"port {settings.port} on {settings.host}"
    try:
        reserve_port(settings.host, settings.port).close()
    except StartError as error:
        models = _served(settings)
        if models is not None:
            return warning(
                "port", f"{place} is taken by a server that has {', '.join(models) or 'models for who has a key'}",
                "end it, use it (`tokenway chat`), or choose another port with --port",
            )  # fmt: skip
        return failed("port", str(error), "choose another address with --host or --port")
    return ok("port", f"{place} is free")


def _served(settings: Settings) -> list[str] | None:
    """The models of the server on the port; None when it is none of the OpenAI API."""
    try:
        return Client(ServerAddress.parse(local_url(settings.host, settings.port)), _ANSWER_TIMEOUT_S).models()
    except KeyWantedError:
        return []
    except ResponseError:
        return None


def check_run_directory(settings: Settings) -> Finding:
    """Whether sockets can be made: their paths must be short, their directory private."""
    if settings.run_dir:
        directory = Path(settings.run_dir).absolute()
        if directory.exists() and (directory.stat().st_uid != os.getuid() or directory.stat().st_mode & 0o077):
            return failed("run directory", f"others may enter {directory}", f"chmod 700 {directory}")
        base = next(folder for folder in [directory, *directory.parents] if folder.exists())
    else:
        base = run_directory_base()
        directory = base / ("x" * _NAME_LENGTH)
    try:
        ipc_endpoint(directory, _LONGEST_SOCKET)
    except EndpointInUseError:
        return failed("run directory", f"the paths of sockets below {base} are too long", "set a shorter --run-dir")
    if not os.access(base, os.W_OK):
        return failed("run directory", f"{base} cannot be written to", "set another --run-dir")
    return ok("run directory", f"sockets can be made in {base}")


def check_running() -> Iterator[Finding]:
    """The servers of this user that run here."""
    for directory in run_directories():
        reason = unhealthy_reason(directory, time.monotonic())
        if reason is None:
            yield ok("running", f"a server with healthy processes in {directory}")
        else:
            yield warning("running", reason, f"if no server uses {directory} any more, the next start removes it")


def check_scheduler(endpoint: str) -> Finding:
    """Whether a scheduler answers at an endpoint, and whether it speaks our protocol. It is not joined."""
    problem = _unreachable(endpoint)
    if problem:
        return failed("scheduler", f"{endpoint}: {problem}", "start it, or mend --scheduler-endpoint")
    refused = _ask_version(endpoint)
    if refused is None:
        text = f"{endpoint}: something listens, but no scheduler answered within {_ANSWER_TIMEOUT_S:.0f} s"
        return failed("scheduler", text, "look at its log; a firewall may drop what is sent")
    if refused.version != PROTOCOL_VERSION:
        text = f"{endpoint} speaks protocol {refused.version}, this installation {PROTOCOL_VERSION}"
        return failed("scheduler", text, "install the same version on all hosts")
    return ok("scheduler", f"{endpoint} answers and speaks protocol {refused.version}")


def _unreachable(endpoint: str) -> str:
    """Why no connection can be made; "" when one can."""
    try:
        if is_ipc(endpoint):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(endpoint.removeprefix("ipc://"))
            return ""
        parts = urlsplit(endpoint)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            return "neither ipc://PATH nor tcp://HOST:PORT"
        socket.create_connection((parts.hostname, parts.port), _ANSWER_TIMEOUT_S).close()
    except ValueError:
        return "neither ipc://PATH nor tcp://HOST:PORT"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ask_version(endpoint: str) -> HandshakeRefused | None:
    """The refusal of a greeting that no scheduler accepts; its form never changes, whatever the version."""
    identity = Identity(Role.TOKENIZER, f"doctor-{new_instance_name()}")
    hello = Hello(_NO_VERSION, identity.role, identity.instance, identity.epoch, "", State.STARTING)
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    try:
        sock.setsockopt(zmq.IDENTITY, identity.routing_id)
        sock.connect(endpoint)
        sock.send(encode(hello))
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while sock.poll(max(0, int(1000 * (deadline_s - time.monotonic())))):
            try:
                message = decode(sock.recv())
            except ProtocolError:
                continue  # of another version
            if isinstance(message, HandshakeRefused):
                return message
        return None
    finally:
        sock.close(linger=0)
        context.term()
