"""Tokenizer process: what /ready and /health say, and the probe behind them.

Healthy means that a token came out lately, because the common failure is a server that runs and serves nothing. An idle
server makes no tokens by itself: a check that finds the last one old sends one request for one token through the whole
pipeline, once for all checks that wait at that moment, within a time limit. No check, no probe. While a step runs that
may rightly take long (a busy machine, a long prompt in one chunk) no probe could get through: then the scheduler's own
limit on steps holds.
"""

from __future__ import annotations

import asyncio
import time

from services.tokenizer.answer_sinks import CollectedAnswers
from services.tokenizer.api_error import ApiError
from services.tokenizer.backend_view import OK
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.submission import new_request_id
from services.wire.columns import pack_int32
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Submit

RECENT_S = 3.0
PROBE_LIMIT_S = 5.0
PAUSED = "paused"
_PROBE_NAME = "probe"


class Health:
    """The checks of one process."""

    def __init__(self, link: SchedulerLink, probe_limit_s: float = PROBE_LIMIT_S) -> None:
        self._link = link
        self._probe_limit_s = probe_limit_s
        self._probe: asyncio.Task[str] | None = None
        self.num_probes = 0

    async def check(self) -> tuple[bool, dict[str, str]]:
        """Whether the server is ready, and for each role and for `tokens` "ok" or what is wrong.

        Takes at most the probe's limit.
        """
        verdicts = self._link.view.health(time.monotonic())
        if all(verdict == OK for verdict in verdicts.values()):
            if self._link.view.is_paused:  # an operator's wish: no probe could get a token
                verdicts["tokens"] = PAUSED
            else:
                verdicts["tokens"] = OK if self._is_working() else await self._probe_once()
        return all(verdict == OK for verdict in verdicts.values()), verdicts

    def close(self) -> None:
        """Ends a running probe."""
        if self._probe is not None:
            self._probe.cancel()

    def _is_working(self) -> bool:
        now_s = time.monotonic()
        last_s = max(self._link.table.last_token_s, self._link.view.last_sign_of_work_s())
        return now_s - last_s < RECENT_S or self._link.view.is_step_running(now_s)

    async def _probe_once(self) -> str:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run_probe())
        return await asyncio.shield(self._probe)

    async def _run_probe(self) -> str:
        self.num_probes += 1
        answer = CollectedAnswers([PendingAnswer()])
        request = self._link.submit([_probe_submit()], answer, time.monotonic())
        try:
            async with asyncio.timeout(self._probe_limit_s):
                await request.admission
                await answer.done
        except ApiError as error:
            return f"a probe failed: {error.message}"
        except TimeoutError:
            return f"a probe got no token within {self._probe_limit_s:.1f} s"
        finally:
            self._link.close_request(request)
        return OK


def _probe_submit() -> Submit:
    """One token behind one token, in a cache of its own."""
    request_id = new_request_id()
    return Submit(
        request_id=request_id,
        attempt=0,
        prompt_token_ids=pack_int32([0]),
        output_token_ids=b"",
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0),
        text=TextParams(stop=(), include_stop_str_in_output=False, skip_special_tokens=True, min_tokens=0),
        max_tokens=1,
        stop_token_ids=b"",
        group_id=request_id,
        tenant=_PROBE_NAME,
        cache_root=_PROBE_NAME.encode(),
        priority=0,
        deadline_ms=int(PROBE_LIMIT_S * 1000),
    )
