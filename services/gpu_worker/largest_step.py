"""gpu_worker: the step that takes the most memory, run once at the start to measure it.

Every row draws from its whole vocabulary, has penalties, and wants as many log-probabilities of its token and of its
prompt as there can be.
"""

from __future__ import annotations

import numpy as np
import torch

from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Spans
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.step_work import RowOptions
from services.wire.columns import pack_int32
from services.wire.request_params import MAX_LOGPROBS, LogitRules, PromptParams, SamplingParams
from services.wire.steps import NewRow

_RULES = LogitRules(frequency_penalty=1.0, repetition_penalty=2.0, allowed_token_ids=pack_int32([0]))


@torch.inference_mode()
def run_largest_step(runner: ModelRunner, num_tokens: int, num_rows: int) -> None:
    """Runs `num_tokens` tokens in `num_rows` rows on the dummy page."""
    device = runner.kv_cache.keys.device
    # Filtering sorts whole rows on a CUDA device; on a CPU it takes time and hardly more memory than drawing.
    top_p = 1.0 if device.type == "cpu" else 0.5
    sampling = SamplingParams(1.0, top_p, 0, 0.0, 0, 0, rules=_RULES, num_logprobs=MAX_LOGPROBS)
    prompt = PromptParams(num_logprobs=MAX_LOGPROBS)
    inputs = runner.dummy_inputs(num_tokens, num_rows)
    lengths = np.array(inputs.query_lengths, dtype=np.int64)
    options = RowOptions(num_rows, runner.config.vocab_size, device)
    options.set_rows(
        [NewRow(row, bytes(16), 0, b"", length, b"", sampling, prompt) for row, length in enumerate(lengths.tolist())],
        [np.zeros(length, dtype=np.int64) for length in lengths.tolist()],
    )
    rows = np.arange(num_rows, dtype=np.int64)
    spans = Spans(rows, rows, np.zeros_like(rows), lengths, np.cumsum(lengths) - lengths)
    work = options.work(Picks(rows, rows, rows, lengths, np.zeros_like(rows)), spans, None)
    hidden = runner.hidden(inputs)
    logits = runner.logits(runner.normed(hidden, inputs.sample_indices))
    options.keep(work, options.run(work, runner, hidden, logits))
