"""Tokenizer process: how many tokens a request took, counted from its journal entries. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.journal import JournalEntry


def usage_of(entries: Sequence[JournalEntry], num_choices: int) -> dict[str, object]:
    """Usage of a request so far: each prompt counts once however many answers it got.

    Args:
        entries: The answers in order: `num_choices` for each prompt.
        num_choices: n.
    """
    firsts = entries[::num_choices]
    prompt_tokens = sum(entry.num_prompt_tokens for entry in firsts)
    completion_tokens = sum(entry.completion_tokens or entry.next_index for entry in entries)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(entry.cached_tokens for entry in firsts)},
    }
