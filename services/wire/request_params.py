"""What a request wants of its prompt, of the drawing of its tokens and of its text: parts that messages hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from services.wire.fields import Float32s, Int32s, UInt31, require_counts, require_rows
from services.wire.forms import Limit, Range

MAX_LOGPROBS = 20
NO_LOGPROBS = -1
NumLogprobs = Annotated[int, Range(NO_LOGPROBS, MAX_LOGPROBS)]  # -1 none; 0 the token's own; n: the n likeliest too


class Task(IntEnum):
    """What a request is for."""

    GENERATE = 0
    EMBED_LAST = 1  # the hidden state of the last prompt token, after the final norm
    EMBED_MEAN = 2  # the mean of the hidden states of all prompt tokens, each after the final norm


class GrammarKind(IntEnum):
    """The language that a `Grammar` is written in."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3
    LARK = 4  # the grammar library's own; what tool calls are built from


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be a sentence of, from its first token on. Its limits were checked by the tokenizer."""

    kind: GrammarKind
    text: Annotated[str, Limit(1024 * 1024)]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What is done to the logits of a row before a token is picked, in this order.

    `allowed_token_ids` (empty: all are), `bias_ids` and `biases`, repetition penalty (prompt and output), frequency and
    presence penalty (output only); ids in `stop_token_ids` cannot come below `min_tokens` output tokens, nor the last
    id of a bad word whose ids before it have just come. `bad_word_counts` cuts `bad_word_ids`.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: UInt31 = 0
    stop_token_ids: Int32s = b""
    bias_ids: Int32s = b""
    biases: Float32s = b""
    allowed_token_ids: Int32s = b""
    bad_word_counts: Int32s = b""
    bad_word_ids: Int32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.bias_ids) // 4, self.biases)
        require_counts(self.bad_word_counts, self.bad_word_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. A token is a function of (seed, choice, position, logits) and of nothing else.

    temperature 0 is greedy; top_k 0 is off; top_p 1 and min_p 0 are off; `choice` numbers the answers of one request.
    `rules` and `grammar` are None for the many requests that use none. Log-probabilities are those of the raw logits.
    """

    temperature: float
    top_p: float
    top_k: UInt31
    min_p: float
    seed: int
    choice: UInt31
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    num_logprobs: NumLogprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class PromptParams:
    """What is wanted of the prompt itself.

    `num_logprobs` log-probabilities for each prompt token from position `logprobs_from` on (position 0 has none:
    nothing comes before it). The prefix cache is used only up to the first position wanted; for EMBED_MEAN not at all.
    """

    task: Task = Task.GENERATE
    num_logprobs: NumLogprobs = NO_LOGPROBS
    logprobs_from: UInt31 = 1


PLAIN_PROMPT = PromptParams()


@dataclass(frozen=True, slots=True)
class TextParams:
    """What the detokenizer needs to know of a request."""

    stop: Annotated[tuple[Annotated[str, Limit(4096)], ...], Limit(64)]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    min_tokens: UInt31
