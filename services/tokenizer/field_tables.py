"""Tokenizer process: the request fields that are known and not built, and those that change no token.

A field of the first kind is a 400 by its name, unless it is null or says what would happen anyway. Building one means
deleting its row here and adding it to `openai_schema`; `docs/api.md` lists the same names and a test holds the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = tuple[object, ...]

# name -> the values that mean the same as leaving it out (null always does)
UNBUILT_EVERYWHERE: Mapping[str, Neutral] = {
    # sampling
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "custom_params": ({},),
    "spaces_between_special_tokens": (True,),
    # probabilities and tokens
    "return_logprob": (False,),
    "return_hidden_states": (False,),
    # structure
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    # engine
    "lora_path": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}

UNBUILT_IN_CHAT: Mapping[str, Neutral] = {
    **UNBUILT_EVERYWHERE,
    "echo": (False,),
    "add_special_tokens": (False,),
    "reasoning": ({},),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

UNBUILT_IN_COMPLETIONS: Mapping[str, Neutral] = {
    **UNBUILT_EVERYWHERE,
    "best_of": (1,),
    "suffix": ("",),
}

# Sent as a matter of course; nothing of the answer depends on them. A caller's own id is never used as one of ours.
WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
    }
)
WITHOUT_EFFECT_IN_STREAM_OPTIONS = frozenset({"include_obfuscation"})


def is_neutral(value: object, neutral: Neutral) -> bool:
    """Whether a field's value asks for nothing: null, or one of `neutral` (a bool is no number here)."""
    return value is None or any(
        isinstance(value, bool) == isinstance(plain, bool) and value == plain for plain in neutral
    )
