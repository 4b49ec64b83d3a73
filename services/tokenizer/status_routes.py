"""Tokenizer process: what can be read of the server: its model, its health, and for the operator everything else."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from services.runtime import metrics
from services.runtime.config import SECRETS, Settings
from services.tokenizer.access import caller_of
from services.tokenizer.generation import Generation, model_not_found
from services.tokenizer.health import Health
from services.tokenizer.json_answer import json_answer
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.submission import sampling_defaults
from services.wire.members import Role
from services.wire.messages import PROTOCOL_VERSION

MODEL_ROUTE = "/v1/models/"


class StatusRoutes:
    """GET /v1/models, /live, /ready, /health, /server_info."""

    def __init__(
        self, settings: Settings, model: ServedModel, link: SchedulerLink, generation: Generation, health: Health
    ) -> None:
        self._settings = settings
        self._model = model
        self._link = link
        self._generation = generation
        self._health = health

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        """The served model, as a list of one."""
        return json_answer({"object": "list", "data": [self._model_card()]})

    async def model_by_id(self, request: web.BaseRequest) -> web.StreamResponse:
        """The served model.

        Raises:
            ApiError: 404 for any other name.
        """
        name = request.path.removeprefix(MODEL_ROUTE)
        if name != self._model.name:
            raise model_not_found(name)
        return json_answer(self._model_card())

    async def live(self, request: web.BaseRequest) -> web.StreamResponse:
        """200 as long as the loop of this process turns."""
        return json_answer({"status": "ok"})

    async def ready(self, request: web.BaseRequest) -> web.StreamResponse:
        """Whether a request would be answered now."""
        is_ready, _ = await self._health.check()
        return json_answer({"status": "ok" if is_ready else "not ready"}, status=200 if is_ready else 503)

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        """The same, and for each role what is wrong with it, to those who have a key."""
        is_ready, verdicts = await self._health.check()
        verdict: dict[str, object] = {"status": "ok" if is_ready else "not ready"}
        if caller_of(request).is_known:
            verdict["roles"] = verdicts
        return json_answer(verdict, status=200 if is_ready else 503)

    async def server_info(self, request: web.BaseRequest) -> web.StreamResponse:
        """Settings without secrets, the model and its sampling defaults, the load, the processes."""
        return json_answer(
            {
                "version": server_version(),
                "protocol": PROTOCOL_VERSION,
                "model": self._model_facts(),
                "sampling_defaults": sampling_defaults(self._model),
                "settings": shown_settings(self._settings),
                "load": self._load(),
                "processes": self._processes(),
            }
        )

    def _model_card(self) -> dict[str, object]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "tokenway",
            "max_model_len": self._generation.max_model_len,
        }

    def _model_facts(self) -> dict[str, object]:
        model = self._model
        return {
            "name": model.name,
            "context_tokens": model.context_tokens,
            "max_model_len": self._generation.max_model_len,
            "vocabulary_entries": model.num_entries,
            "embedding_size": model.embedding_size,
            "end_token_ids": sorted(model.end_token_ids),
        }

    def _load(self) -> dict[str, object] | None:
        load = self._link.view.load
        return None if load is None else {**dataclasses.asdict(load), "state": load.state.name.lower()}

    def _processes(self) -> list[dict[str, object]]:
        """Every process by its last heartbeat; a worker with what it brings: chunk, pool, rows."""
        return [
            {
                "role": str(member.role),
                "instance": member.instance,
                "state": member.state.name.lower(),
                "age_ms": member.age_ms,
                **({"facts": metrics.plain_gauges(member.metrics)} if member.role is Role.GPU_WORKER else {}),
            }
            for member in self._link.view.members
        ]


def server_version() -> str:
    """The version that is installed; of a checkout that is not, nothing is known."""
    try:
        return version("tokenway")
    except PackageNotFoundError:
        return "unknown"


def shown_settings(settings: Settings) -> dict[str, object]:
    """All settings but the secrets; of those, whether they are set."""
    values: dict[str, object] = dataclasses.asdict(settings)
    return {name: ("set" if value else "") if name in SECRETS else value for name, value in values.items()}
