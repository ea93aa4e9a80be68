"""Whether a row has the same bits in any batch: the probes see it where it is not so."""

from unittest.mock import patch

import torch
from torch import Tensor

from headway.runtime.attention.varlen import VarlenAttention
from headway.runtime.cuda.same_bits import (
    COUNTS,
    differing,
    differing_attention,
    format_differences,
)

FEW = (2, 3, 8)


def row_by_row(x_TH: Tensor) -> Tensor:
    """Sums whose order is each row's own."""
    return x_TH.double().cumsum(1).float()


def test_a_product_that_changes_with_the_rows_is_told():
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    assert differing(row_by_row, x, FEW) == []

    def by_rows(x_TH: Tensor) -> Tensor:
        """Another order of sums from 3 rows on."""
        return row_by_row(x_TH if len(x_TH) < 3 else x_TH * 3) / (1 if len(x_TH) < 3 else 3)

    assert differing(by_rows, x, FEW) == [3, 8]


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor, *longest: int
) -> Tensor:
    """Decodes one by one, as torch's kernel is called."""
    found = []
    for row, length in enumerate(lens.tolist()):
        keys, values = (x[table[row].long()].flatten(0, 1)[:length] for x in (k, v))
        weights = torch.einsum("gnd,tgd->gnt", q[row].unflatten(0, (k.shape[2], -1)), keys)
        found.append(torch.einsum("gnt,tgd->gnd", weights.softmax(-1), values).flatten(0, 1))
    return torch.stack(found)


def test_attention_whose_splits_depend_on_the_longest_is_told():
    """Contexts of other rows are read by nobody else; a factor by the longest changes bits."""
    shape = (4, 2, 8)
    assert differing_attention(attend, "cpu", torch.float32, shape, FEW, 40) == []

    def by_longest(*given: object) -> Tensor:
        factor = float(given[-1]) / 3  # type: ignore[arg-type]
        return attend(*given) * factor / factor  # type: ignore[arg-type]

    found = differing_attention(by_longest, "cpu", torch.float32, shape, FEW, 40)
    assert found and set(found) <= set(FEW)


def test_torchs_attention_is_called_as_the_probe_calls():
    """With a CPU's attention in its place, since it has no kernel here."""

    def torchs(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, none: None, *longest: int, **how):  # type: ignore[no-untyped-def]
        assert none is None and how["num_splits"] == 1 and how["window_size"] == (-1, 0)
        return attend(q, k, v, starts, how["seqused_k"], how["block_table"])

    shape, backend = (2, 1, 8), VarlenAttention()
    with patch("torch.nn.attention.varlen.varlen_attn", torchs):
        found = differing_attention(backend.attend_paged, "cpu", torch.float32, shape, FEW, 40)
    assert found == []


def test_the_sentence():
    assert format_differences([]) == f"a row has the same bits alone and among 2 … {COUNTS[-1]}"
    assert (
        format_differences([*range(2, 12)]) == "a row has other bits among 2, 3, 4, 5, 6, 7 … rows"
    )
