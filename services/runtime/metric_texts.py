"""What each metric is: the `# HELP` lines of /metrics, and the tables of docs/operations.md, which a test holds equal.

A heartbeat carries names and values only, so whoever renders the group's metrics looks the texts up here. Names are
without the prefix and without the endings that the text format adds.
"""

from __future__ import annotations

from collections.abc import Mapping

OF_TOKENIZER: Mapping[str, str] = {
    "http_requests": "ended requests by `route` and `status`",
    "finished_answers": "ended answers by `reason`: stop, length, abort, timeout, error",
    "prompt_tokens": "tokens of admitted prompts, as in `usage`",
    "generation_tokens": "tokens received, as in `usage`",
    "time_to_first_token_seconds": "from a request's head to its first token",
    "inter_token_latency_seconds": "between the chunks of an answer",
    "request_time_per_output_token_seconds": "mean time of an answer's tokens after the first",
    "e2e_request_latency_seconds": "from a request's head to its last byte",
    "request_queue_seconds": "from an answer's coming to the scheduler to its first plan",
    "request_inference_seconds": "from an answer's first plan to its last token",
    "hop_seconds": "time in each part of the way, by `hop`: http, tokenize, queue, prefill, decode, detokenize",
    "request_prompt_tokens": "tokens of a prompt",
    "request_generation_tokens": "tokens of an answer",
    "request_max_generation_tokens": "tokens of the longest answer of a request",
    "tokenizer_open_http_requests": "requests being answered",
    "tokenizer_open_streams": "event streams being written",
    "tokenizer_open_answers": "answers asked for and not closed",
    "tokenizer_connections": "open connections to the public port",
    "tokenizer_traces": "ended requests kept for /trace",
    "tokenizer_texts_to_encode": "long texts waiting or being encoded",
    "tokenizer_event_loop_lag_seconds": "how late a timer was last called",
    "tokenizer_outbox_frames": "frames that wait to be sent, by `link`",
    "tokenizer_aborted_answers": "answers given up before their end",
    "tokenizer_old_rows": "rows dropped: repeated, late, or of another attempt",
    "tokenizer_late_rows": "rows for answers that are closed",
    "tokenizer_gaps": "rows behind a gap",
    "tokenizer_refused_messages": "messages and frames dropped",
    "tokenizer_refused_connections": "connections over the limits of their number",
    "tokenizer_over_budget": "requests over the budget of their key",
    "tokenizer_lost_reports": "reports about requests that nobody remembers",
    "tokenizer_health_probes": "tokens made for health checks",
}

OF_SCHEDULER: Mapping[str, str] = {
    "scheduler_num_requests_running": "requests in the batch",
    "scheduler_num_requests_waiting": "requests not admitted yet",
    "scheduler_num_requests_held": "of these, those that wait for a sibling's prompt",
    "scheduler_num_requests_compiling": "of these, those whose grammar is being compiled",
    "scheduler_num_requests_retracted": "requests that wait to resume",
    "scheduler_paused": "1 while an operator's pause holds: nothing is planned",
    "scheduler_records": "requests known, ended ones not acknowledged included",
    "scheduler_refused_requests": "requests not taken",
    "scheduler_finished": "requests that ended, by `reason`: stop, length, abort, timeout, error",
    "scheduler_kv_pages": "pages of the KV pool",
    "scheduler_kv_pages_free": "pages that hold nothing",
    "scheduler_kv_pages_cached": "pages kept for reuse; free + cached is what new requests can have",
    "scheduler_kv_pages_used": "pages that running requests need: the rest",
    "scheduler_evicted_pages": "cached pages given up for others",
    "scheduler_plans_in_flight": "plans whose result has not come",
    "scheduler_steps": "steps whose result came",
    "scheduler_prompt_tokens": "prompt tokens of admitted requests",
    "scheduler_cached_tokens": "of these, those that came from the prefix cache",
    "scheduler_computed_tokens": "tokens computed, those computed again after a retraction included",
    "scheduler_output_tokens": "tokens produced",
    "scheduler_admitted": "requests admitted",
    "scheduler_retracted": "times that a running request lost its pages: the pool is small for the load",
    "scheduler_dropped_rows": "rows of results for requests that had ended",
    "scheduler_failed_rows": "rows that failed alone",
    "scheduler_outbox_frames": "frames that wait for a peer to take them, by `link`; should be 0",
    "scheduler_stale_messages": "messages about unknown requests or other attempts",
    "scheduler_dropped_messages": "messages and frames dropped",
    "scheduler_queue_seconds": "from a request's coming to its first plan",
    "scheduler_prefill_seconds": "from a request's first plan to its first token",
    "scheduler_step_rows": "rows of a step: the batch size",
    "scheduler_step_tokens": "tokens of a step",
    "scheduler_plan_seconds": "time to make a plan",
}

OF_GPU_WORKER: Mapping[str, str] = {
    "worker_steps": "forward passes",
    "worker_step_seconds": "time of a step, from its plan to its result",
    "worker_forward_seconds": "time of forward passes alone",
    "worker_computed_tokens": "tokens computed, of prompts and answers",
    "worker_sampled_tokens": "tokens sampled",
    "worker_failed_rows": "rows that failed in a step",
    "worker_kv_write_bytes": "keys and values written to the pool",
    "worker_kv_pool_bytes": "size of the pool",
    "worker_held_rows": "rows that requests hold",
    "worker_chunk_tokens": "prefill chunk that was measured",
    "worker_refused_messages": "plans, messages and frames dropped",
    "worker_outbox_frames": "frames that wait to be sent",
    "worker_mask_seconds": "what grammars cost in a step: masks, and following what its rows got",
    "worker_mask_wait_seconds": "how long a step waited for its masks",
    "worker_grammar_compile_seconds": "time of compiling a grammar, in the child and in the worker",
    "worker_compiled_grammars": "grammars compiled",
    "worker_refused_grammars": "grammars that cannot be compiled",
    "worker_known_grammars": "grammars asked for again: the answer was known",
    "worker_killed_grammar_children": "children ended because a grammar took too long or too much",
    "worker_forced_tokens": "tokens that a grammar left no choice about, taken at once",
    "worker_kept_grammars": "compiled grammars that are kept",
}

OF_DETOKENIZER: Mapping[str, str] = {
    "detokenizer_open_answers": "answers begun and not ended",
    "detokenizer_outbox_frames": "frames that wait to be sent, by `link`",
    "detokenizer_tokens": "tokens turned into text",
    "detokenizer_stop_strings": "answers ended by a stop string",
    "detokenizer_old_rows": "rows dropped: repeated, late, or of another attempt",
    "detokenizer_resends_asked": "gaps asked for again: frames were lost",
    "detokenizer_failed_answers": "answers that could not be decoded",
    "detokenizer_unread_answers": "answers dropped with their tokenizer process",
    "detokenizer_refused_messages": "messages and frames dropped",
    "detokenizer_batch_rows": "chunks made in a turn",
    "detokenizer_decode_seconds": "time of a turn: from the tokens' coming to their chunks' leaving",
}

TEXTS: Mapping[str, str] = {**OF_TOKENIZER, **OF_SCHEDULER, **OF_GPU_WORKER, **OF_DETOKENIZER}
