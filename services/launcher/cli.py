"""The command `tokenway`: serve, models."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.launcher.child import ChildSpec
from services.launcher.models import ALIASES, fetch, find_on_disk, models_directory, resolve_model
from services.launcher.port import reserve_port
from services.launcher.progress import HttpStartup, SilentStartup, show
from services.launcher.run_directory import given_run_directory, new_run_directory
from services.launcher.supervisor import EXIT_INTERRUPTED, Startup, Stop, Supervisor
from services.runtime.config import FlagParser, Settings, SettingsError, add_flags, inherited_environment, load_settings
from services.runtime.service import EXIT_BAD_START, StartError
from services.wire.errors import WireError
from services.wire.messages import Role

_START_ORDER = (Role.SCHEDULER, Role.GPU_WORKER, Role.TOKENIZER, Role.DETOKENIZER)
_NEEDS_MODEL = frozenset(_START_ORDER[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 after a failure, 2 for a bad start, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not words or words[0] in ("-h", "--help", "--version"):
        parser.parse_args(words or ["--help"])
    try:
        match words:
            case ["serve", *rest]:
                return _serve(rest)
            case _:
                return _models(parser.parse_args(words))
    except (SettingsError, StartError, WireError, OSError) as error:
        print(f"tokenway: {error}", file=sys.stderr)
        return EXIT_BAD_START
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenway", description="Serves large language models.")
    parser.add_argument("--version", action="version", version=f"tokenway {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="start a server (`tokenway serve --help` lists every setting)", add_help=False)
    models = commands.add_parser("models", help="list the models known by name and what lies on this disk")
    _add_models_dir(models)
    actions = models.add_subparsers(dest="action", metavar="pull")
    pull = actions.add_parser("pull", help="fetch a model")
    pull.add_argument("name", metavar="NAME", help="alias, or owner/name on the hub")
    pull.add_argument("--to", type=Path, metavar="DIR", help="folder to put it in (default: --models-dir)")
    _add_models_dir(pull)
    return parser


def _add_models_dir(parser: argparse.ArgumentParser) -> None:
    (field,) = (field for field in dataclasses.fields(Settings) if field.name == "models_dir")
    parser.add_argument("--models-dir", metavar="DIR", help=field.metadata["help"], default=argparse.SUPPRESS)


def _version() -> str:
    try:
        return version("tokenway")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def _serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenway serve",
        description="Starts a scheduler, a worker, tokenizers and detokenizers, and watches them.",
        epilog="Each setting is also a key of a TOML file (--config) and a variable TOKENWAY_...; flags win over "
        "variables, variables over the file. Status: 0 after SIGTERM, 130 after Ctrl-C, 2 when it cannot start, "
        "1 when a process died.",
        allow_abbrev=False,
    )
    parser.add_argument("--role", choices=[str(role) for role in Role], help="start one process of this role only")
    add_flags(parser)
    return parser


def _serve(arguments: Sequence[str]) -> int:
    role, rest = _take_role(arguments)
    settings = load_settings(rest)
    roles = _START_ORDER if role is None else (role,)
    with ExitStack() as stack:
        if Role.TOKENIZER in roles:
            reserved = stack.enter_context(reserve_port(settings.host, settings.port))
            settings = dataclasses.replace(settings, port=reserved.getsockname()[1])
        if _NEEDS_MODEL.intersection(roles):
            model = resolve_model(settings.model, settings)
            name = settings.served_model_name or model.name
            settings = dataclasses.replace(settings, model=str(model.path), served_model_name=name)
        run_dir = stack.enter_context(_run_directory(settings, role))
        specs = _child_specs(roles, dataclasses.replace(settings, run_dir=str(run_dir)))
        return Supervisor(specs, _startup(settings, specs, roles), Stop.draining(settings.drain_timeout_s)).run()


def _take_role(arguments: Sequence[str]) -> tuple[Role | None, list[str]]:
    """The role, and the arguments that are settings; `--help` ends here."""
    if "-h" in arguments or "--help" in arguments:
        _serve_parser().parse_args(["--help"])
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--role")
    found, rest = parser.parse_known_args(arguments)
    if found.role is None:
        return None, rest
    if found.role not in list(Role):
        raise SettingsError(f"--role must be one of {', '.join(Role)}")
    return Role(found.role), rest


def _run_directory(settings: Settings, role: Role | None) -> AbstractContextManager[Path]:
    if settings.run_dir:
        return given_run_directory(Path(settings.run_dir))
    if role is not None and not settings.scheduler_endpoint:
        raise StartError("--role needs --scheduler-endpoint or --run-dir: where the other roles are found")
    return new_run_directory()


def _child_specs(roles: Sequence[Role], settings: Settings) -> list[ChildSpec]:
    """What to start. Tokenizers stop first: they finish what is open while the others still work for them."""
    is_group = len(roles) > 1
    counts = {Role.TOKENIZER: settings.num_tokenizers, Role.DETOKENIZER: settings.num_detokenizers}
    specs = []
    for role in roles:
        for number in range(counts.get(role, 1) if is_group else 1):
            own = dataclasses.replace(settings, instance=str(number)) if is_group else settings
            specs.append(
                ChildSpec(
                    name=f"{role}-{number}" if is_group else str(role),
                    command=(sys.executable, "-m", f"services.{role}"),
                    environment=inherited_environment() | own.as_environment(),
                    stop_order=0 if role == Role.TOKENIZER else 1,
                )
            )
    return specs


def _startup(settings: Settings, specs: Sequence[ChildSpec], roles: Sequence[Role]) -> Startup:
    if Role.TOKENIZER in roles:
        return HttpStartup(settings.host, settings.port, [spec.name for spec in specs])
    return SilentStartup(specs[0].name)


def _models(arguments: argparse.Namespace) -> int:
    settings = load_settings([f"--models-dir={arguments.models_dir}"] if "models_dir" in arguments else [])
    if arguments.action == "pull":
        fetch(arguments.name, arguments.to or models_directory(settings))
        return 0
    for alias, source in ALIASES.items():
        path = find_on_disk(alias, settings)
        show(f"{alias:14} {getattr(source, 'file_name', source):40} {path or 'not on this disk'}")
    show(f"models fetched by name go to {models_directory(settings)}")
    return 0
