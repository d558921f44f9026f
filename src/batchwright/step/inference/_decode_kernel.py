"""A kernel for one query per row over a range of keys: it reads what a row has, and nothing of its padding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Keys that are read at once.
_BLOCK = 64


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator, unused-ignore]
# The compiler reads annotations as code, in which only names of Triton are known.
def _attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    results: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    # One program per row and head. Softmax in one pass over the keys (Milakov and Gimelshein 2018): where a higher
    # score comes, what was summed so far is scaled down.
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + row)
    stop = tl.load(stops + row)
    inner = tl.arange(0, size)
    query = tl.load(queries + (row * num_heads + head) * size + inner).to(tl.float32) * scale
    # Several heads of queries share one of keys; 64 bits, as a large cache has more than 2**31 numbers.
    first = (row * (num_heads // num_groups) + head // num_groups).to(tl.int64) * width * size
    highest = -float("inf")
    total = 0.0
    sums = tl.zeros([size], dtype=tl.float32)
    for at in range(start, stop, block):
        places = at + tl.arange(0, block)
        inside = places < stop
        where = first + places[:, None].to(tl.int64) * size + inner[None, :]
        key = tl.load(keys + where, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(key * query[None, :], axis=1), -float("inf"))
        now = tl.maximum(highest, tl.max(scores, axis=0))
        shares = tl.exp(scores - now)
        before = tl.exp(highest - now)
        value = tl.load(values + where, mask=inside[:, None], other=0.0).to(tl.float32)
        total = total * before + tl.sum(shares, axis=0)
        sums = sums * before + tl.sum(shares[:, None] * value, axis=0)
        highest = now
    result = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(results + (row * num_heads + head) * size + inner, result.to(results.dtype.element_ty))


def attend_on_cuda(query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, scale: float) -> Tensor:
    """Return what ``attend_plainly`` does, on a CUDA device.

    Args:
        query: ``(rows, heads, 1, size)``.
        key: ``(rows, heads of keys, width, size)``, the first rows and places of a contiguous tensor.
        value: as ``key``.
        start: the first key of each row, in int32.
        stop: the place after its last key.
        scale: of the scores.
    """
    num_rows, num_heads, _, size = query.shape
    flat = query.reshape(num_rows, num_heads, size).contiguous()
    results = torch.empty_like(flat)
    _attend[(num_rows, num_heads)](
        flat, key, value, results, start, stop, key.stride(1) // size, scale,
        num_heads, num_heads // key.shape[1], size, _BLOCK, num_warps=4,
    )  # fmt: skip
    return results[:, :, None]
