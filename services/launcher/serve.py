"""`tokenway serve`: starts the processes of a host under a supervisor."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from services.launcher.child import ChildSpec
from services.launcher.models import resolve_model
from services.launcher.port import free_ports, reserve_port
from services.launcher.progress import Entrance, HttpStartup, SilentStartup
from services.launcher.run_directory import given_run_directory, new_run_directory, shared_run_directory
from services.launcher.supervisor import Startup, Stop, Supervisor
from services.model_files.errors import ModelFileError
from services.model_files.rank_limits import sharing_problem
from services.model_files.source import model_name, open_model
from services.runtime.config import (
    FlagParser,
    Settings,
    SettingsError,
    add_flags,
    inherited_environment,
    load_settings,
)
from services.runtime.rank_place import RANK_VARIABLES, rank_place, rank_variables
from services.runtime.service import StartError
from services.wire.members import Role

_START_ORDER = (Role.SCHEDULER, Role.GPU_WORKER, Role.TOKENIZER, Role.DETOKENIZER)
_NEEDS_MODEL = frozenset(_START_ORDER[1:])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="tokenway serve",
        description="Starts a scheduler, workers, tokenizers and detokenizers, and watches them.",
        epilog="Example: tokenway serve qwen3:0.6b --port 9000. Each setting is also a key of a TOML file (--config) "
        "and a variable TOKENWAY_...; flags win over variables, variables over the file. Status: 0 after SIGTERM, 130 "
        "after Ctrl-C, 2 when it cannot start, 1 when a process died.",
        allow_abbrev=False,
    )
    made.add_argument("--role", choices=[str(role) for role in Role], help="start one process of this role only")
    add_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Runs a server until it ends; the exit status: 0, 1 after a death, 2 for a bad start, 130 after Ctrl-C."""
    role, rest = _take_role(arguments)
    settings = load_settings(rest)
    roles = _START_ORDER if role is None else (role,)
    with ExitStack() as stack:
        if Role.TOKENIZER in roles:
            reserved = stack.enter_context(reserve_port(settings.host, settings.port))
            settings = dataclasses.replace(settings, port=reserved.getsockname()[1])
        if _NEEDS_MODEL.intersection(roles):
            model = resolve_model(settings.model, settings)
            name = settings.served_model_name or model.name or model_name(model.path)
            settings = dataclasses.replace(settings, model=str(model.path), served_model_name=name)
        if Role.GPU_WORKER in roles and settings.tp_size > 1:
            _check_ranks(settings)
        run_dir = stack.enter_context(_run_directory(settings, role))
        specs = _child_specs(roles, dataclasses.replace(settings, run_dir=str(run_dir)))
        return Supervisor(specs, _startup(settings, specs, roles), Stop.draining(settings.drain_timeout_s)).run()


def _check_ranks(settings: Settings) -> None:
    """Refuses more ranks than can share the model: they would find out only once all of them are up."""
    try:
        config = open_model(settings.model).config
    except ModelFileError as error:
        raise StartError(str(error)) from error
    if problem := sharing_problem(config, settings.tp_size):
        raise StartError(problem)


def _take_role(arguments: Sequence[str]) -> tuple[Role | None, list[str]]:
    """The role, and the arguments that are settings; `--help` ends here."""
    if "-h" in arguments or "--help" in arguments:
        parser().parse_args(["--help"])
    flags = FlagParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--role")
    found, rest = flags.parse_known_args(arguments)
    if found.role is None:
        return None, rest
    if found.role not in list(Role):
        raise SettingsError(f"--role must be one of {', '.join(Role)}")
    return Role(found.role), rest


def _run_directory(settings: Settings, role: Role | None) -> AbstractContextManager[Path]:
    if settings.run_dir:
        path = Path(settings.run_dir)
        return given_run_directory(path) if role is None else shared_run_directory(path)
    if role is not None and not settings.scheduler_endpoint:
        raise StartError("--role needs --scheduler-endpoint or --run-dir: where the other roles are found")
    return new_run_directory()


def _child_specs(roles: Sequence[Role], settings: Settings) -> list[ChildSpec]:
    """What to start. Tokenizers stop first: they finish what is open while the others still work for them."""
    is_group = len(roles) > 1
    counts = {
        Role.GPU_WORKER: settings.dp_size,
        Role.TOKENIZER: settings.num_tokenizers,
        Role.DETOKENIZER: settings.num_detokenizers,
    }
    inherited = inherited_environment()
    if is_group:  # its workers are no ranks of whatever group the launcher may be started in
        inherited = {name: value for name, value in inherited.items() if name not in RANK_VARIABLES}
    # Where the ranks of each worker meet.
    meeting_ports = free_ports(settings.dp_size if settings.tp_size > 1 else 0)
    specs = []
    for role in roles:
        for number in range(counts.get(role, 1) if is_group else 1):
            own = dataclasses.replace(settings, instance=str(number)) if is_group else settings
            if is_group and role == Role.GPU_WORKER:
                own = dataclasses.replace(own, dp_rank=number)
            if role != Role.TOKENIZER:  # nobody else need know them
                own = own.without_secrets()
            spec = ChildSpec(
                name=f"{role}-{number}" if is_group else str(role),
                command=(sys.executable, "-m", f"services.{role}"),
                environment=inherited | own.as_environment(),
                stop_order=0 if role == Role.TOKENIZER else 1,
                kind=str(role),
            )
            has_ranks = role == Role.GPU_WORKER and settings.tp_size > 1 and (is_group or rank_place() is None)
            specs += _ranks(spec, own, meeting_ports[number]) if has_ranks else [spec]
    return specs


def _ranks(worker: ChildSpec, settings: Settings, port: int) -> list[ChildSpec]:
    """The processes of a worker whose model is shared: each gets what torchrun would tell it."""
    specs = []
    for rank in range(settings.tp_size):
        instance = f"{settings.instance}-rank-{rank}" if rank else settings.instance
        own = dataclasses.replace(settings, instance=instance.removeprefix("-"))
        variables = own.as_environment() | rank_variables(rank, settings.tp_size, port)
        name = f"{worker.name}-rank-{rank}" if rank else worker.name
        specs.append(dataclasses.replace(worker, name=name, environment=dict(worker.environment) | variables))
    return specs


def _startup(settings: Settings, specs: Sequence[ChildSpec], roles: Sequence[Role]) -> Startup:
    if Role.TOKENIZER in roles:
        entrance = Entrance(
            settings.host,
            settings.port,
            is_encrypted=bool(settings.tls_cert),
            needs_key=bool(settings.api_key or settings.api_key_file),
            model=settings.served_model_name,
        )
        return HttpStartup(entrance, [spec.name for spec in specs])
    return SilentStartup(specs[0].name)
