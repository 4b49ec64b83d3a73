"""`tokenway models`: what is known by name, what lies on this disk, fetching and removing."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.launcher.command_parser import command_parser
from services.launcher.downloads import cached_names, cached_snapshot, has_weights
from services.launcher.errors import CommandError
from services.launcher.model_facts import model_facts, size_of, size_text
from services.launcher.models import ALIASES, fetch, find_on_disk, folder_name, hub_name, models_directory, source_name
from services.launcher.terminal import Style, Terminal, aligned, harmless
from services.runtime.config import FlagParser, Settings, load_settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "models", "Lists the models known by name and what lies on this disk.", "tokenway models pull qwen3:0.6b"
    )
    _add_models_dir(made)
    actions = made.add_subparsers(dest="action", metavar="pull | rm", parser_class=FlagParser)
    pull = actions.add_parser(
        "pull", help="fetch a model; says its size before", description="Fetches a model, once; says its size before.",
        epilog="Example: tokenway models pull qwen3:0.6b --models-dir /data/models",
    )  # fmt: skip
    pull.add_argument("name", metavar="NAME", help="alias, or owner/name on the hub")
    pull.add_argument("--to", type=Path, metavar="DIR", help="folder to put it in (default: --models-dir)")
    _add_models_dir(pull)
    remove = actions.add_parser(
        "rm", help="remove a model that was fetched", description="Removes a model from --models-dir, after asking.",
        epilog="Example: tokenway models rm qwen3:0.6b",
    )  # fmt: skip
    remove.add_argument("name", metavar="NAME", help="as `tokenway models` lists it")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    _add_models_dir(remove)
    return made


def run(arguments: Sequence[str]) -> int:
    """Lists, fetches or removes; the exit status: 1 when the person did not want it removed.

    Raises:
        CommandError: no such model, it cannot be fetched, or it is not ours to remove; one line.
    """
    options = parser().parse_args(arguments)
    settings = load_settings([f"--models-dir={options.models_dir}"] if "models_dir" in options else [])
    if options.action == "pull":
        fetch(options.name, options.to or models_directory(settings))
        return 0
    if options.action == "rm":
        return _remove(options.name, settings, options.yes)
    _show(settings)
    return 0


def _add_models_dir(made: argparse.ArgumentParser) -> None:
    (field,) = (field for field in dataclasses.fields(Settings) if field.name == "models_dir")
    made.add_argument("--models-dir", metavar="DIR", help=field.metadata["help"], default=argparse.SUPPRESS)


@dataclass(frozen=True)
class _Found:
    """A model on this disk and the name that leads to it."""

    name: str
    path: Path


def _show(settings: Settings) -> None:
    terminal = Terminal()
    found = list(_on_disk(settings))
    rows = [("NAME", "SIZE", "FORMAT", "CONTEXT", "PATH")]
    for model in found:
        facts = model_facts(model.path)
        kind = f"{facts.format} {facts.dtype}".strip() if not facts.problem else f"damaged: {facts.problem}"
        context = f"{facts.context:,}" if facts.context else ""
        rows.append((model.name, size_text(facts.num_bytes), harmless(kind), context, str(model.path)))
    here = {model.name for model in found}
    rows += [(alias, "", source_name(alias), "", "not on this disk") for alias in ALIASES if alias not in here]
    head, *lines = aligned(rows, right=(1, 3))
    terminal.line(terminal.styled(head, Style.BOLD))
    for row, line in zip(rows[1:], lines, strict=True):
        terminal.line(line if row[0] in here else terminal.styled(line, Style.DIM))
    terminal.line(f"models fetched by name go to {models_directory(settings)}")


def _on_disk(settings: Settings) -> Iterator[_Found]:
    """Aliases first, then what else was fetched, then what lies in the hub library's own cache."""
    known = set()
    for alias in ALIASES:
        path = find_on_disk(alias, settings)
        if path is not None:
            known.add(path)
            yield _Found(alias, path)
    for path in _fetched(models_directory(settings)):
        if path not in known:
            yield _Found(hub_name(path), path)
    for name in cached_names():
        cached = cached_snapshot(name)
        if cached is not None and cached not in known:
            yield _Found(name, cached)


def _fetched(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*") if path.suffix == ".gguf" or has_weights(path))


def _remove(name: str, settings: Settings, is_agreed: bool) -> int:
    directory = models_directory(settings)
    path = directory / folder_name(name)
    candidates = [path, path.with_name(f"{path.name}.partial")]
    found = [item for item in candidates if item in directory.glob("[!.]*")]  # so never `..` or the directory itself
    if not found:
        elsewhere = find_on_disk(name, settings)
        if elsewhere is not None:
            raise CommandError(f"{name} lies in {elsewhere}, which was not fetched by this command: it is left alone")
        raise CommandError(f"{name} is not in {directory}; `tokenway models` lists what is")
    size = size_text(sum(map(size_of, found)))
    if not is_agreed and not _agrees(f"remove {found[0]} ({size})? [y/N] "):
        return 1
    for item in found:
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
    Terminal().line(f"removed {found[0]}: {size} are free again")
    return 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise CommandError("nobody can be asked here: say --yes to remove it")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
