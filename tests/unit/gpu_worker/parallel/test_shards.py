"""Which part of a model each rank holds: together the parts are the model, whatever does not divide evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.models.checkpoint_layout import Placement, allocate_weights, placements
from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.rotary import RotaryConfig
from services.gpu_worker.parallel.shards import Shard, split_model, undivided
from services.runtime.service import StartError

META = torch.device("meta")
SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    has_qk_norm=False,
    rms_norm_eps=1e-5,
    rotary=RotaryConfig((1.0,) * 32, 1.0),
    windows=(None, None),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    experts=None,
    dtype=torch.float32,
)

CONFIGS = st.builds(
    lambda kv, group, dim, middle, vocab, flags: replace(
        SMOLLM2,
        num_kv_heads=kv,
        num_heads=kv * group,
        head_dim=2 * dim,
        hidden_size=8,
        intermediate_size=middle,
        vocab_size=vocab,
        has_qk_norm=flags[0],
        qkv_bias=flags[1],
        output_bias=flags[2],
        mlp_bias=flags[3],
        tie_word_embeddings=flags[4],
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(1, 700),
    st.tuples(*[st.booleans()] * 5),
)


def shards(config: ModelConfig, size: int) -> list[Shard]:
    return [split_model(config, rank, size) for rank in range(size)]


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.integers(1, 8))
def test_every_number_of_every_tensor_is_in_the_model_once(config: ModelConfig, size: int) -> None:
    try:
        parts = shards(config, size)
    except StartError as error:
        assert f"--tp-size {size}" in str(error)  # noqa: PT017
        return
    whole = {item.name: torch.zeros(item.target.shape) for item in _placements(config)}
    for shard in parts:
        for item in _placements(shard.layout):
            part = shard.part(item.name)
            target = whole[item.name]
            if part is None:
                continue
            own = target[part.first_row : part.first_row + item.target.shape[0]]
            if item.target.dim() == 2:
                own = own[:, part.first_column : part.first_column + item.target.shape[1]]
            assert own.shape == item.target.shape
            own += 1
    holders = size // config.num_kv_heads if size > config.num_kv_heads else 1
    for name, counts in whole.items():
        if name.endswith("norm.weight"):
            assert (counts == size).all(), name
        elif ".k_proj." in name or ".v_proj." in name:
            assert counts.min() >= holders, name  # more ranks than heads: each head is on several
        else:
            assert (counts == 1).all(), name


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.integers(1, 8))
def test_query_heads_stay_with_the_heads_that_they_read(config: ModelConfig, size: int) -> None:
    try:
        parts = shards(config, size)
    except StartError:
        return
    group = config.num_heads // config.num_kv_heads
    for shard in parts:
        own = shard.config
        assert own.num_heads % own.num_kv_heads == 0
        own_group = own.num_heads // own.num_kv_heads
        for place in range(own.num_heads):
            head = shard.queries.first + place
            assert head // group == shard.kv_heads.first + place // own_group


def test_the_demo_model_over_two_ranks() -> None:
    first, second = shards(SMOLLM2, 2)
    assert [first.config.num_heads, first.config.num_kv_heads] == [6, 2]
    assert [second.config.num_heads, second.config.num_kv_heads] == [3, 1]
    assert first.config.intermediate_size == second.config.intermediate_size == 768
    assert first.layout.vocab_size == second.layout.vocab_size == 24576
    assert first.config.vocab_size == 49152


def test_one_rank_holds_everything() -> None:
    shard = undivided(SMOLLM2)
    assert shard.config == shard.layout == SMOLLM2
    assert shard.part("anything").first_row == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "size", "field"),
    [
        ({}, 10, "num_attention_heads 9 with num_key_value_heads 3"),
        ({"intermediate_size": 1}, 2, "intermediate_size 1"),
        ({"vocab_size": 1}, 2, "vocab_size 1"),
    ],
)
def test_what_cannot_be_shared_is_named(changes: dict[str, int], size: int, field: str) -> None:
    with pytest.raises(StartError, match=f"--tp-size {size}: {field}"):
        shards(replace(SMOLLM2, **changes), size)  # type: ignore[arg-type]


def test_experts_are_refused() -> None:
    experts = ExpertConfig(8, 2, 32, True, (False, True))
    with pytest.raises(StartError, match="--tp-size 2: a llama model has experts"):
        split_model(replace(SMOLLM2, experts=experts), 0, 2)


def test_a_tensor_without_a_rule_is_named() -> None:
    shard = split_model(SMOLLM2, 0, 2)
    with pytest.raises(StartError, match=r"mlp\.experts\.0\.up_proj\.weight"):
        shard.part("model.layers.0.mlp.experts.0.up_proj.weight")


def _placements(config: ModelConfig) -> Iterator[Placement]:
    return placements(config, allocate_weights(config, torch.float32, META))
