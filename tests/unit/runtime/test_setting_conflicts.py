"""Settings that contradict each other are refused when they are read, by name and with what would be right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.runtime.capacity import LEAST_ASKED_TOKENS
from services.runtime.config import Settings, SettingsError, load_settings

EXACT = "--numerics exact computes in float32: {} goes with --numerics fast"


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"numerics": "exact", "dtype": "bfloat16"}, EXACT.format("--dtype bfloat16")),
        ({"numerics": "exact", "kv_cache_dtype": "float16"}, EXACT.format("--kv-cache-dtype float16")),
        ({"numerics": "exact", "kv_cache_dtype": "fp8"}, EXACT.format("--kv-cache-dtype fp8")),
        ({"numerics": "exact", "quantization": "fp8"}, EXACT.format("--quantization fp8")),
        ({"numerics": "exact", "quantization": "int8"}, EXACT.format("--quantization int8")),
        (
            {"quantization": "int4", "load_format": "dummy"},
            "--quantization int4 rounds the weights of a file, --load-format dummy reads none: set one of the two",
        ),
        (
            {"quantization": "int8", "dtype": "float16"},
            "--quantization int8 is for activations in float32: --dtype float16 goes without it",
        ),
        (
            {"max_num_batched_tokens": 128},
            "a step of 128 tokens cannot hold 256 running requests: raise --max-num-batched-tokens or lower "
            "--max-running-requests",
        ),
        (
            {"chunked_prefill_size": -1, "max_model_len": 4096, "kv_cache_tokens": 500, "max_num_batched_tokens": 767},
            "without chunks a step must hold a whole prompt beside all running requests, 512 + 256 tokens: "
            "--max-num-batched-tokens is 767",
        ),
        ({"max_model_len": 1}, "--max-model-len 1 holds no prompt and answer: set 2 or more"),
        (
            {"kv_cache_tokens": 8},
            "--kv-cache-tokens 8 is a pool of 16 tokens (1 of --page-size 16), too small for a prompt and its answer: "
            "set 64 or more, or leave it out",
        ),
        (
            {"kv_cache_tokens": 9, "page_size": 4, "max_model_len": 20},
            "--kv-cache-tokens 9 is a pool of 12 tokens (3 of --page-size 4), too small for a prompt and its answer: "
            "set 20 or more, or leave it out",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(**chosen)
    assert str(refused.value) == problem
    with pytest.raises(SettingsError) as refused:
        load_settings([], {f"TOKENWAY_{name.upper()}": str(value) for name, value in chosen.items()})
    assert str(refused.value) == problem
    for name in chosen if len(chosen) == 2 and "numerics" in chosen else ():
        dataclasses.replace(Settings(), **{name: chosen[name]})  # either of them alone is well


@pytest.mark.parametrize(
    "chosen",
    [
        {"numerics": "exact", "dtype": "float32", "kv_cache_dtype": "float32"},
        {"quantization": "int8", "dtype": "float32"},
        {"max_num_batched_tokens": 256},
        {"chunked_prefill_size": -1, "max_model_len": 4096, "kv_cache_tokens": 500, "max_num_batched_tokens": 768},
        {"chunked_prefill_size": -1, "kv_cache_tokens": 500, "max_num_batched_tokens": 400},  # the context may be less
        {"max_model_len": 2, "kv_cache_tokens": 2},
        {"kv_cache_tokens": LEAST_ASKED_TOKENS - 15},  # in whole pages that is the least
        {"kv_cache_tokens": 1, "page_size": 1024},
    ],
)
def test_settings_that_go_together_are_taken(chosen: dict[str, Any]) -> None:
    assert dataclasses.replace(Settings(), **chosen) == Settings(**chosen)
