"""gpu_worker: what the rows of a step want of their logits and hidden states, and what they get.

A request may want its logits changed, log-probabilities, those of its prompt, or a pooled hidden state. Each of these
is a table of its own, by row; here they are filled together, asked together what a step has to do, and told what came
of it. What no row of a step wants costs nothing: one look at a small array tells what any row wants at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.bit_masks import take_from_others
from services.gpu_worker.fused_sampler import sampler_for
from services.gpu_worker.logit_rules import LogitRulesTable, StepRules
from services.gpu_worker.logprobs import AskingRows, LogprobsTable, RowLogprobs, row_logprobs
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.pooling import Pooled, PooledRows, PoolingTable
from services.gpu_worker.prepared_step import Spans
from services.gpu_worker.prompt_logprobs import PromptLogprobsTable, PromptValues, WantedPositions, prompt_values
from services.gpu_worker.proposals import Proposals
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.sampler import DrawnRows, SampledTokens
from services.gpu_worker.sampling_table import Kind, SamplingTable, kind_of
from services.gpu_worker.uploads import Int64s
from services.wire.request_params import NO_LOGPROBS, Task
from services.wire.steps import NewRow

_DRAW, _RULES, _LOGPROBS, _PROMPT, _POOLED = (1 << bit for bit in range(5))  # wishes of a row


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Which ids the grammars of some rows allow: logit_rows [n] int64 and bits [n, num_words] int32, on the device."""

    logit_rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step has to do after its layers have run; None: no row wants it.

    Attributes:
        picks: the rows that pick a token.
        groups: which of them draw, for the sampler.
        rules, masks, asking, wanted, pooled: see their classes.
        num_proposed: proposals of the step; the last so many rows of the logits are theirs.
    """

    picks: Picks
    groups: list[DrawnRows]
    rules: StepRules | None
    masks: StepMasks | None
    asking: AskingRows | None
    wanted: WantedPositions | None
    pooled: PooledRows | None
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What came of it: tokens of all rows, and what some of them wanted besides, in parts.

    `verified` is what was sampled behind each proposal; None: there were none.
    """

    tokens: SampledTokens
    logprobs: tuple[RowLogprobs, ...] = ()
    prompts: tuple[PromptValues, ...] = ()
    pooled: tuple[Pooled, ...] = ()
    verified: SampledTokens | None = None

    @classmethod
    def joined(cls, parts: Sequence[StepOutput]) -> StepOutput:
        """The output of a step that was run row by row."""
        tokens = SampledTokens(
            torch.cat([part.tokens.token_ids for part in parts]), torch.cat([part.tokens.is_failed for part in parts])
        )
        return cls(
            tokens,
            tuple(each for part in parts for each in part.logprobs),
            tuple(each for part in parts for each in part.prompts),
            tuple(each for part in parts for each in part.pooled),
        )

    def to_host(self) -> StepOutput:
        """The same on the host, perhaps only once the device has come this far."""
        if self.tokens.token_ids.is_cpu:
            return self
        return StepOutput(
            self.tokens.to_host(),
            tuple(each.to_host() for each in self.logprobs),
            tuple(each.to_host() for each in self.prompts),
            tuple(each.to_host() for each in self.pooled),
            None if self.verified is None else self.verified.to_host(),
        )


class RowOptions:
    """What rows [0, max_rows) want."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._wishes = [0] * max_rows
        self._sample = sampler_for(device)
        self._sampling = SamplingTable(max_rows, device)
        self._rules = LogitRulesTable(max_rows, vocab_size, device)
        self._logprobs = LogprobsTable(max_rows, device)
        self._prompts = PromptLogprobsTable(max_rows, device)
        self._pooling = PoolingTable(max_rows, device)

    def set_rows(self, new_rows: Sequence[NewRow], token_ids: Sequence[Int64s]) -> None:
        """Sets what some rows want from now on; `token_ids` are all ids of each, of the vocabulary."""
        self._sampling.set_rows([new.row for new in new_rows], [new.sampling for new in new_rows])
        for new, ids in zip(new_rows, token_ids, strict=True):
            self._wishes[new.row] = _wishes_of(new)
            self._rules.set_row(new.row, new.sampling.rules, ids, new.num_prompt_tokens)
            self._logprobs.set_row(new.row, new.sampling)
            self._prompts.set_row(new.row, new.prompt, ids[: new.num_prompt_tokens])
            self._pooling.set_row(new.row, new.prompt.task, new.num_prompt_tokens)

    def append(self, row: int, token_ids: Int64s) -> None:
        """A row got these ids without picking them."""
        self._rules.append(row, token_ids)

    def work(self, picks: Picks, spans: Spans, masks: StepMasks | None, proposals: Proposals | None = None) -> StepWork:
        """What a step has to do. It changes nothing here: the same may be asked again for a row by itself."""
        drawn_rows, positions, logit_rows = picks.rows, picks.positions, picks.logit_rows
        num_proposed = 0
        if proposals is not None:
            num_proposed = len(proposals.rows)
            drawn_rows = np.concatenate([drawn_rows, proposals.rows])
            positions = np.concatenate([positions, proposals.positions])
            logit_rows = np.concatenate([logit_rows, len(spans.rows) + np.arange(num_proposed)])
        wishes = 0
        for row in spans.rows.tolist():
            wishes |= self._wishes[row]
        return StepWork(
            picks=picks,
            groups=self._sampling.groups(drawn_rows, positions, logit_rows) if wishes & _DRAW else [],
            rules=self._rules.among(picks) if wishes & _RULES else None,
            masks=masks,
            asking=self._logprobs.among(picks) if wishes & _LOGPROBS else None,
            wanted=self._prompts.among(spans) if wishes & _PROMPT else None,
            pooled=self._pooling.among(spans) if wishes & _POOLED else None,
            num_proposed=num_proposed,
        )

    def run(self, work: StepWork, runner: ModelRunner, hidden: Tensor, logits: Tensor) -> StepOutput:
        """Does it.

        Args:
            work: what.
            runner: the model.
            hidden: [num_tokens, hidden_size], of the step.
            logits: [num_rows, vocab_size] float32, of each row's last own token, and behind them those of proposals;
                changed unless somebody asks for them raw.
        """
        sampled = self._sample(self._changed(work, logits), work.groups)
        tokens, verified = sampled, None
        if work.num_proposed:
            num_rows = len(logits) - work.num_proposed
            tokens, verified = sampled.among(0, num_rows), sampled.among(num_rows, len(logits))
        return StepOutput(
            tokens,
            () if work.asking is None else tuple(row_logprobs(logits, tokens.token_ids, work.asking)),
            () if work.wanted is None else (prompt_values(runner, hidden, work.wanted),),
            () if work.pooled is None else (self._pooling.pool(runner, hidden, work.pooled),),
            verified,
        )

    def keep(self, work: StepWork, output: StepOutput) -> None:
        """Remembers what the next steps need of the output of a whole step."""
        if work.rules is not None:
            self._rules.keep(work.rules, output.tokens.token_ids)
        for pooled in output.pooled:
            self._pooling.keep(pooled)

    def _changed(self, work: StepWork, logits: Tensor) -> Tensor:
        """The logits to pick from: rules first, then what the grammars allow, which has the last word."""
        if work.rules is None and work.masks is None:
            return logits
        changed = logits if work.asking is None else logits.clone()
        if work.rules is not None:
            self._rules.apply(changed, work.rules)
        if work.masks is not None:
            take_from_others(changed, work.masks.logit_rows, work.masks.bits, math.inf)
        return changed


def _wishes_of(new: NewRow) -> int:
    """The tables that have something to do for a row, now or later."""
    wishes = {
        _DRAW: kind_of(new.sampling) != Kind.GREEDY,
        _RULES: new.sampling.rules is not None,
        _LOGPROBS: new.sampling.num_logprobs != NO_LOGPROBS,
        _PROMPT: new.prompt.num_logprobs != NO_LOGPROBS,
        _POOLED: new.prompt.task != Task.GENERATE,
    }
    return sum(wish for wish, is_wanted in wishes.items() if is_wanted)
