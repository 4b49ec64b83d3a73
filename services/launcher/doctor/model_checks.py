"""A model: its files, its tokenizer, and whether it fits, before it is downloaded too."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.launcher.child_questions import ask_child
from services.launcher.doctor.findings import Finding, failed, ok, warning
from services.launcher.downloads import IndexPackage, look_up
from services.launcher.errors import CommandError, HubUnreachableError, ModelNotFoundError
from services.launcher.model_facts import model_facts, size_text
from services.launcher.models import ALIASES, model_on_disk, models_directory
from services.runtime.config import Settings

FIT_CHECK = "services.gpu_worker.fit_check"
_RENDER = "services.tokenizer.render_prompt"
_NO_TEMPLATE = "no chat template"


def check_model(settings: Settings) -> Iterator[Finding]:
    """All that can be told of the model that the settings name."""
    try:
        path = model_on_disk(settings.model, settings)
    except ModelNotFoundError as error:
        yield failed("model", str(error), "`tokenway models` lists what is known")
        return
    if path is None:
        yield from _check_unfetched(settings)
        return
    facts = model_facts(path)
    if facts.problem:
        yield failed("model", f"{path}: {facts.problem}", _again(path, settings))
        return
    kind = " ".join(part for part in (facts.format, facts.dtype, facts.model_type) if part)
    yield ok("model", f"{path}: {kind}, {size_text(facts.num_bytes)}, context {facts.context:,}")
    here = dataclasses.replace(settings, model=str(path))
    yield _check_fit(here)
    yield _check_tokenizer(here)


def _again(path: Path, settings: Settings) -> str:
    """How to have the files of a model once more: only what `models pull` put there may `models rm` take away."""
    if path.parent == models_directory(settings):
        return f"fetch it again: `tokenway models rm {settings.model}`, then `tokenway models pull {settings.model}`"
    return "put its files there again, or choose another model"


def _check_unfetched(settings: Settings) -> Iterator[Finding]:
    source = ALIASES.get(settings.model, settings.model)
    directory = models_directory(settings)
    if isinstance(source, IndexPackage):
        yield _check_room(settings.model, 2 * source.num_bytes, directory)
        return
    try:
        published = look_up(source)
        yield _check_room(settings.model, published.num_bytes, directory)
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            published.fetch_configuration(Path(folder))
            yield _check_fit(dataclasses.replace(settings, model=folder), "--config-only")
    except HubUnreachableError as error:
        remedy = "without the hub nobody can tell whether it would fit: try again with a network"
        yield failed("model", str(error), remedy)
    except ModelNotFoundError as error:
        yield failed("model", str(error), "mend what it says, or choose another: `tokenway models` lists what is known")


def _check_room(name: str, num_bytes: int, directory: Path) -> Finding:
    place = next(folder for folder in [directory, *directory.parents] if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{name} is not on this disk; fetching it takes {size_text(num_bytes)}, {size_text(free)} are free"
    if num_bytes > free:
        return failed("model", text, f"make room in {directory}, or choose another disk with --models-dir")
    return ok("model", text)


def _check_fit(settings: Settings, *arguments: str) -> Finding:
    try:
        fit = ask_child(FIT_CHECK, settings, arguments)["fit"]
    except CommandError as error:
        return failed("fit", f"cannot be told: {error}", "mend what is said about packages and device, and try again")
    if fit["problem"]:
        problem = str(fit["problem"]).replace(f"{settings.model}/", "")
        return failed("fit", f"{sizes(fit)}; {problem}" if fit["weight_bytes"] else problem, str(fit["remedy"]))
    text = f"{sizes(fit)}; room for {fit['pool_tokens']:,} tokens of KV cache"
    if fit["pool_tokens"] < fit["context"]:
        more = "raise --kv-cache-tokens" if settings.kv_cache_tokens else "free memory"
        remedy = f"set --max-model-len {fit['pool_tokens']} or less, or {more}"
        return warning("fit", f"{text}, less than the context of {fit['context']:,}", remedy)
    return ok("fit", text)


def sizes(fit: Mapping[str, Any]) -> str:
    """What a model takes, for people."""
    return (
        f"{fit['num_weights'] / 1e6:,.0f} M weights take {size_text(fit['weight_bytes'])}, used in {fit['dtype']}, "
        f"a token of KV cache {size_text(fit['kv_bytes_per_token'])}, a step about {size_text(fit['activation_bytes'])}"
    )


def _check_tokenizer(settings: Settings) -> Finding:
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    try:
        found = ask_child(_RENDER, settings, question=chat)
    except CommandError as error:
        if _NO_TEMPLATE in str(error):
            return warning("tokenizer", "no chat template: chat requests are refused", "give one with --chat-template")
        is_of_setting = bool(settings.chat_template) and settings.chat_template in str(error)
        setting = "--chat-template" if is_of_setting else "the setting that it names" if "--" in str(error) else ""
        return failed("tokenizer", str(error), f"mend {setting}" if setting else "fetch the model's files again")
    return ok("tokenizer", f"works; a chat of one word is {found['count']} tokens")
