"""gpu_worker: attention of rows with several new tokens over the paged pool: a chunk on top of its cached prefix.

The new tokens of all such rows are cut into blocks; a program attends one block for one query head over the row's
tokens up to the block's last, a tile of keys at a time with the online softmax (arXiv 1805.02867, 2205.14135).

    keys     0 ............ prefix ............ | new ............ end
    block 0  [ .............................. | .... )                   causal within the chunk
    block 1  [ .............................. | ........... )            a window cuts off the left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.kernels.pool_tiles import LOG2_E, load_tile, takes_float32, tile_tokens
from services.gpu_worker.uploads import upload

_MANY_WARPS_ELEMENTS = 16384  # of queries in a block: the sums of so many fill the registers of eight warps


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """New tokens of a step in blocks.

    Attributes:
        blocks: [4, num_blocks] int64: line of the page table, place of the first token among the new ones, tokens
            in the block, position of the first.
        page_table: [num_rows, max_pages] int64.
        block_tokens: most tokens of a block, a power of two.
    """

    blocks: Tensor
    page_table: Tensor
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The new tokens of one row: its line in the page table, the first of them among all, how many, and where it is."""

    row: int
    token: int
    num_tokens: int
    position: int


def cut_chunks(chunks: Sequence[Chunk], page_table: Tensor, most_tokens: int) -> ChunkBlocks:
    """Cuts rows into blocks, the later (longer) ones of each row first: what takes long begins early.

    Args:
        chunks: at least one.
        page_table: [num_rows, max_pages] int64.
        most_tokens: of a block, a power of two >= 16; a smaller one is taken where no row has so many.
    """
    size = min(most_tokens, max(16, power_of_two(max(chunk.num_tokens for chunk in chunks))))
    blocks = [
        (chunk.row, chunk.token + start, min(size, chunk.num_tokens - start), chunk.position + start)
        for chunk in chunks
        for start in reversed(range(0, chunk.num_tokens, size))
    ]
    return ChunkBlocks(upload(np.array(blocks, dtype=np.int64).T, page_table.device), page_table, size)


def prefill_attention(
    queries: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBlocks, window: int | None, output: Tensor
) -> None:
    """Causal attention of the tokens in the blocks over their rows.

    Args:
        queries: [num_tokens, num_heads, head_dim], heads of a token side by side.
        keys: [num_pages, page_size, num_kv_heads, head_dim] contiguous: one layer of the pool, with the chunk's own.
        values: likewise.
        chunks: the tokens.
        window: see `StepAttention.attend`.
        output: [num_tokens, num_heads, head_dim] contiguous; the lines of the blocks' tokens are written.
    """
    _, num_heads, head_dim = queries.shape
    page_size, num_kv_heads = keys.shape[1:3]
    dim_block = max(16, power_of_two(head_dim))
    num_blocks = chunks.blocks.shape[1]
    _attend_block[(num_blocks, num_heads)](
        queries,
        keys,
        values,
        chunks.page_table,
        chunks.blocks,
        output,
        head_dim**-0.5 * LOG2_E,
        num_blocks,
        queries.stride(0),
        chunks.page_table.stride(0),
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window or 0,
        query_block=chunks.block_tokens,
        dim_block=dim_block,
        token_block=tile_tokens(queries, dim_block),
        in_float32=takes_float32(queries),
        num_warps=8 if chunks.block_tokens * dim_block >= _MANY_WARPS_ELEMENTS else 4,
    )


@kernel
def _attend_block(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    blocks: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    page_size: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    query_block: tl.constexpr,
    dim_block: tl.constexpr,
    token_block: tl.constexpr,
    in_float32: tl.constexpr,
) -> None:
    """One block of new tokens for one query head."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (num_heads // num_kv_heads)
    pages = page_table + tl.load(blocks + block) * table_stride
    token = tl.load(blocks + num_blocks + block)
    count = tl.load(blocks + 2 * num_blocks + block).to(tl.int32)
    position = tl.load(blocks + 3 * num_blocks + block).to(tl.int32)
    begin = position * 0
    if window > 0:
        begin = tl.maximum(position - window + 1, 0)
    end = position + count

    members = tl.arange(0, query_block)
    dims = tl.arange(0, dim_block)
    is_query = (members < count)[:, None] & (dims < head_dim)[None, :]
    query = tl.load(
        queries + (token + members)[:, None] * query_stride + head * head_dim + dims[None, :], mask=is_query, other=0.0
    )
    if in_float32:
        query = query.to(tl.float32)
    query_positions = position + members

    highest = tl.full([query_block], float("-inf"), tl.float32)
    total = tl.full([query_block], 0.0, tl.float32)
    sum_of_values = tl.full([query_block, dim_block], 0.0, tl.float32)
    for start in range(begin, end, token_block):
        at = start + tl.arange(0, token_block)
        is_read = at < end
        key, value = load_tile(
            keys, values, pages, at, is_read, kv_head, dims, page_size, num_kv_heads, head_dim, query.dtype
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        is_seen = at[None, :] <= query_positions[:, None]
        if window > 0:
            is_seen = is_seen & (at[None, :] > query_positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A token whose window lies behind this tile has seen nothing yet.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(highest - base)
        weight = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weight, 1)
        sum_of_values = sum_of_values * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher

    # Lines past the block's tokens may have seen nothing at all; they are not stored.
    result = sum_of_values / tl.where(total == 0.0, 1.0, total)[:, None]
    out = ((token + members)[:, None] * num_heads + head) * head_dim + dims[None, :]
    tl.store(output + out, result.to(output.dtype.element_ty), mask=is_query)
