"""Whether the bits of a row depend on the batch, tried out on the device (batch invariance).

A library that chooses its algorithm by the number of rows may add in another order for one row than
for nine. Each probe computes rows alone and in a batch of M, and returns the M with differences.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COUNTS = (2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256)
"""Numbers of rows at which libraries change their algorithm, and their neighbours."""
PAGE, LONGEST = 16, 1200
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""(queries, keys, values, starts, context lengths, table, longest query, longest context)."""


def differing(
    product: Callable[[Tensor], Tensor], x_TH: Tensor, counts: Sequence[int] = COUNTS
) -> list[int]:
    """Return the M for which a row of `product` of the first M rows has other bits than alone."""
    alone = torch.cat([product(x_TH[row : row + 1]) for row in range(max(counts))])
    return [count for count in counts if not torch.equal(product(x_TH[:count]), alone[:count])]


def differing_attention(
    attend: Attend,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    counts: Sequence[int] = COUNTS,
    longest: int = LONGEST,
    page: int = PAGE,
) -> list[int]:
    """Return the M for which one of M decodes of many lengths has other bits than alone.

    `shape` is (query heads, KV heads, head size). The last of the M contexts is the longest of all.
    """
    heads, kv_heads, size = shape
    most, draw = max(counts), torch.Generator(device).manual_seed(1)
    pages = -(-longest // page)

    def drawn(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=draw, device=device).to(dtype)

    q = drawn(most, heads, size)
    k, v = (drawn(pages + 1, page, kv_heads, size) for _ in range(2))
    table = (torch.arange(pages, dtype=torch.int32, device=device) + 1).expand(most, -1)
    lens = [1 + 97 * row % longest for row in range(most)]

    def of(rows: list[int]) -> Tensor:
        contexts = [lens[row] for row in rows]
        if len(rows) > 1:
            contexts[-1] = longest
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        of_rows = torch.tensor(contexts, dtype=torch.int32, device=device)
        tables = table[: len(rows)].contiguous()
        picked = q[rows[0] : rows[-1] + 1]
        return attend(picked, k, v, starts, of_rows, tables, 1, max(contexts))

    alone = torch.cat([of([row]) for row in range(most)])
    return [
        count
        for count in counts
        if not torch.equal(of([*range(count)])[: count - 1], alone[: count - 1])
    ]


def format_differences(differences: list[int], counts: Sequence[int] = COUNTS) -> str:
    """Return the counts as a sentence, for the start-up lines and reports.

    >>> format_differences([]), format_differences([17, 32])
    ('a row has the same bits alone and among 2 … 256', 'a row has other bits among 17, 32 rows')
    """
    if not differences:
        return f"a row has the same bits alone and among {min(counts)} … {max(counts)}"
    some = ", ".join(map(str, differences[:6])) + (" …" if len(differences) > 6 else "")
    return f"a row has other bits among {some} rows"
