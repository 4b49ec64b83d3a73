"""gpu_worker: attention of rows with one new token each over the paged pool, in two kernels.

A row's context is cut into splits that run side by side (few rows would leave most of the device idle otherwise); each
gives its own softmax-weighted sum and the logarithm of its weights' total, and a second kernel joins them. The way is
that of FlashDecoding, with the online softmax of arXiv 1805.02867.

    row 0   [ split 0 ][ split 1 ][ split 2 ]          positions[token] + 1 tokens, or the window's
    row 1   [ s0 ][ s1 ][ s2 ]                         splits of a short row are short, or empty

No number about a row is read on the host: a launch may be captured and replayed when lengths and pages have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.kernels.pool_tiles import LOG2_E, load_tile, takes_float32, tile_tokens

_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Which rows of a step decode.

    Attributes:
        tokens: [num_decoding] int64, places of their tokens among the new tokens of the step.
        rows: [num_decoding] int64, their lines in the page table.
        positions: [num_tokens] int64, of all new tokens; a row's length is its token's position + 1.
        page_table: [num_rows, max_pages] int64.
        num_splits: parts that each row's context is cut into, see `splits_for`.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    page_table: Tensor
    num_splits: int


def splits_for(num_rows: int, num_kv_heads: int, max_length: int, num_processors: int) -> int:
    """Into how many parts to cut contexts: two programs for each processor, but no part shorter than 256 tokens.

    Args:
        num_rows: rows that decode.
        num_kv_heads: of the model.
        max_length: no row is longer; need not be reached.
        num_processors: multiprocessors of the device.
    """
    wanted = -(-2 * num_processors // (num_rows * num_kv_heads))
    return max(1, min(wanted, -(-max_length // 256), _MAX_SPLITS))


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, decoding: DecodeRows, window: int | None, output: Tensor
) -> None:
    """Attends, for each decoding row, over its tokens up to the new one.

    Args:
        queries: [num_tokens, num_heads, head_dim], heads of a token side by side.
        keys: [num_pages, page_size, num_kv_heads, head_dim] contiguous: one layer of the pool.
        values: likewise.
        decoding: the rows.
        window: see `StepAttention.attend`.
        output: [num_tokens, num_heads, head_dim] contiguous; the lines of decoding tokens are written.
    """
    num_rows = decoding.tokens.shape[0]
    _, num_heads, head_dim = queries.shape
    page_size, num_kv_heads = keys.shape[1:3]
    parts, dim_block = decoding.num_splits, max(16, power_of_two(head_dim))
    group = num_heads // num_kv_heads
    sums, weights = output, output
    if parts > 1:
        sums = torch.empty((num_rows, num_heads, parts, head_dim), dtype=torch.float32, device=queries.device)
        weights = torch.empty((num_rows, num_heads, parts), dtype=torch.float32, device=queries.device)
    _attend_split[(num_rows, num_kv_heads, parts)](
        queries,
        keys,
        values,
        decoding.page_table,
        decoding.tokens,
        decoding.rows,
        decoding.positions,
        sums,
        weights,
        head_dim**-0.5 * LOG2_E,
        queries.stride(0),
        decoding.page_table.stride(0),
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        window=window or 0,
        num_splits=parts,
        group_block=max(16, power_of_two(group)),
        dim_block=dim_block,
        token_block=tile_tokens(queries, dim_block),
        in_float32=takes_float32(queries),
    )
    if parts > 1:
        _join_splits[(num_rows, num_heads)](
            sums,
            weights,
            decoding.tokens,
            output,
            num_heads=num_heads,
            head_dim=head_dim,
            num_splits=parts,
            split_block=power_of_two(parts),
            dim_block=dim_block,
        )


@kernel
def _attend_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    page_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    num_splits: tl.constexpr,
    group_block: tl.constexpr,
    dim_block: tl.constexpr,
    token_block: tl.constexpr,
    in_float32: tl.constexpr,
) -> None:
    """One split of one row for the query heads of one key/value head."""
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(tokens + place)
    pages = page_table + tl.load(rows + place) * table_stride
    length = tl.load(positions + token).to(tl.int32) + 1
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = (length - first + num_splits * token_block - 1) // (num_splits * token_block) * token_block
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    members = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)
    heads = kv_head * group + members
    is_query = (members < group)[:, None] & (dims < head_dim)[None, :]
    query_places = token * query_stride + heads[:, None] * head_dim + dims[None, :]
    query = tl.load(queries + query_places, mask=is_query, other=0.0)
    if in_float32:
        query = query.to(tl.float32)

    highest = tl.full([group_block], float("-inf"), tl.float32)
    total = tl.full([group_block], 0.0, tl.float32)
    sum_of_values = tl.full([group_block, dim_block], 0.0, tl.float32)
    for start in range(begin, end, token_block):
        at = start + tl.arange(0, token_block)
        is_read = at < end
        key, value = load_tile(
            keys, values, pages, at, is_read, kv_head, dims, page_size, num_kv_heads, head_dim, query.dtype
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        kept = tl.exp2(highest - higher)
        weight = tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(weight, 1)
        sum_of_values = sum_of_values * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher

    divisor = tl.where(total == 0.0, 1.0, total)  # an empty split
    result = sum_of_values / divisor[:, None]
    if num_splits == 1:
        out = (token * num_kv_heads * group + heads)[:, None] * head_dim + dims[None, :]
        tl.store(sums + out, result.to(sums.dtype.element_ty), mask=is_query)
    else:
        part = (place.to(tl.int64) * num_kv_heads * group + heads) * num_splits + split
        tl.store(sums + part[:, None] * head_dim + dims[None, :], result, mask=is_query)
        tl.store(weights + part, highest + tl.log2(divisor), mask=members < group)


@kernel
def _join_splits(
    sums: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    output: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    num_splits: tl.constexpr,
    split_block: tl.constexpr,
    dim_block: tl.constexpr,
) -> None:
    """The splits of one row and query head become one."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.arange(0, split_block)
    dims = tl.arange(0, dim_block)
    is_dim = dims < head_dim
    parts = (place.to(tl.int64) * num_heads + head) * num_splits + splits
    logarithms = tl.load(weights + parts, mask=splits < num_splits, other=float("-inf"))
    share = tl.exp2(logarithms - tl.max(logarithms, 0))
    is_part = (splits < num_splits)[:, None] & is_dim[None, :]
    part = tl.load(sums + parts[:, None] * head_dim + dims[None, :], mask=is_part, other=0.0)
    joined = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    token = tl.load(tokens + place)
    tl.store(output + (token * num_heads + head) * head_dim + dims, joined.to(output.dtype.element_ty), mask=is_dim)
