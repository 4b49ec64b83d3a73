"""Between scheduler and worker: plans, results and grammars; also what a result holds for the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.wire.errors import ProtocolError
from services.wire.fields import (
    Epoch,
    Float32s,
    Int32s,
    RequestId,
    RequestIds,
    Uint8s,
    UInt31,
    require_counts,
    require_finishes,
    require_logprobs,
    require_rows,
)
from services.wire.forms import Limit, Range
from services.wire.request_params import PLAIN_PROMPT, Grammar, PromptParams, SamplingParams


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Worker -> scheduler (in a StepResult) -> tokenizer: log-probabilities of prompt tokens, chunk by chunk.

    For the prompt's positions from `first_position` on: `counts[i]` entries each, first the prompt's own token, then
    the likeliest, best first; a value may be -inf. The scheduler keeps what it sent until the answer has ended.
    """

    request_id: RequestId
    attempt: UInt31
    first_position: UInt31
    counts: Int32s
    token_ids: Int32s
    logprobs: Float32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_counts(self.counts, self.token_ids)
        require_rows(len(self.token_ids) // 4, self.logprobs)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Worker -> scheduler (in a StepResult) -> tokenizer: the pooled hidden state of a prompt, not normalized."""

    request_id: RequestId
    attempt: UInt31
    values: Float32s


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request takes a row at the worker: all its ids (prompt, then outputs so far), where output begins, its pages.

    `page_ids` is the whole page table so far: cached prefix pages, then pages to be written. Penalties and the
    grammar's state are rebuilt from the output ids. `prompt.logprobs_from` is the first position still wanted.
    """

    row: UInt31
    request_id: RequestId
    attempt: UInt31
    token_ids: Int32s
    num_prompt_tokens: UInt31
    page_ids: Int32s
    sampling: SamplingParams
    prompt: PromptParams = PLAIN_PROMPT


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> worker: one forward pass, and only what changed since the last plan.

    Applied in this order: `released_rows` are forgotten; `new_rows` are set up; `page_counts` cuts `page_ids` into what
    is appended to the page tables of `page_rows`; then row `rows[i]` computes `num_new_tokens[i]` tokens from position
    `start_positions[i]` on, and samples one token after the last of them if `samples[i]`. A decoding row's newest token
    may not be known to the scheduler yet: the worker has it.

    `proposal_counts` is empty when no row speculates; else it has one count for each row, and cuts `proposal_ids`: the
    last so many tokens of the row's are not its own but proposed. The row samples after its own last token and after
    each proposal; a proposal stands if it is the id sampled in its place, and so do all before it. A row with
    proposals is in no other plan until the result has come.
    """

    epoch: Epoch
    step: Annotated[int, Range(0, 2**63 - 1)]
    released_rows: Int32s
    new_rows: Annotated[tuple[NewRow, ...], Limit(65536)]
    page_rows: Int32s
    page_counts: Int32s
    page_ids: Int32s
    rows: Int32s
    start_positions: Int32s
    num_new_tokens: Int32s
    samples: Uint8s
    proposal_counts: Int32s = b""
    proposal_ids: Int32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.page_rows) // 4, self.page_counts)
        require_counts(self.page_counts, self.page_ids)
        require_rows(len(self.rows) // 4, self.start_positions, self.num_new_tokens)
        if len(self.samples) != len(self.rows) // 4:
            raise ProtocolError("columns of different lengths")
        if self.samples.translate(None, b"\0\1"):
            raise ProtocolError("samples are 0 or 1")
        require_counts(self.proposal_counts, self.proposal_ids)
        if self.proposal_counts:
            require_rows(len(self.rows) // 4, self.proposal_counts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Worker -> scheduler: what a plan gave, for the rows that sampled and the rows that failed.

    `epoch` and `step` are the plan's. `first_indexes` is the output index of each row's first id, `counts` (0..m) cuts
    `token_ids`, `finishes` is NONE or why the row failed. Times are the worker's own, in microseconds. A row gets more
    than one id where its grammar leaves no choice; the plans already out for it then give it none. It also gets more
    where proposals stood: these, and the id sampled after the last of them; all but the last id are computed then.
    Log-probabilities are cut as in `TokensProduced`. `prompt_logprobs` and `embeddings` belong to rows of this step.
    """

    epoch: Epoch
    step: Annotated[int, Range(0, 2**63 - 1)]
    rows: Int32s
    request_ids: RequestIds
    attempts: Int32s
    first_indexes: Int32s
    counts: Int32s
    token_ids: Int32s
    finishes: Uint8s
    forward_us: UInt31
    step_us: UInt31
    logprob_counts: Int32s = b""
    logprob_ids: Int32s = b""
    logprobs: Float32s = b""
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Limit(65536)] = ()
    embeddings: Annotated[tuple[Embedding, ...], Limit(65536)] = ()

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        num_rows = len(self.rows) // 4
        require_rows(num_rows, self.attempts, self.first_indexes, self.counts)
        require_counts(self.counts, self.token_ids)
        require_finishes(num_rows, self.finishes)
        if len(self.request_ids) // 16 != num_rows:
            raise ProtocolError("columns of different lengths")
        require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Scheduler -> worker: a request waits for this grammar; answered with `GrammarCompiled`. It takes no row yet."""

    request_id: RequestId
    attempt: UInt31
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """Worker -> scheduler: rows may use the grammar now; or, with a text, why it cannot be used: the client's fault."""

    request_id: RequestId
    attempt: UInt31
    problem: Annotated[str, Limit(4096)] = ""
