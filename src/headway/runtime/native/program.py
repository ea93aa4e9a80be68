"""A model's forward as a list of operations that one native call runs; see native/program.h.

What a program is told once: its operations, how wide the rows of each buffer are and where the
result lies. What it promises: the numbers of the same operations called one by one, bit for bit, in
memory that is reused from step to step.
"""

import numpy as np
import torch
from torch import Tensor

from headway.runtime.batch import Batch
from headway.runtime.native.available import OPERATION_BYTES
from headway.runtime.native.library import NativeLibrary, address

CODES = ("embed", "norm", "linear", "quantized", "rope", "gated", "add", "write_kv", "attention")
PLACE = np.dtype([("buffer", "i4"), ("first", "i4"), ("step", "i4")])
KV_MEMORY = np.dtype(
    [
        *((name, "u8") for name in ("k", "v", "k_scale", "v_scale")),
        *((name, "i8") for name in ("kv_heads", "head_dim", "block_size")),
        ("type", "i4"),
        ("paired", "?"),
    ],
    align=True,
)
OPERATION = np.dtype(
    [
        *(("code", "i4"), ("type", "i4")),
        *((name, PLACE) for name in ("x", "y", "second")),
        *((name, "i4") for name in ("scratch", "activation", "weight_type")),
        *((name, "u8") for name in ("weight", "bias", "scales", "order")),
        *((name, "i8") for name in ("width", "count", "layout", "pairs", "kv_group")),
        *((name, "i8") for name in ("window", "sinks")),
        *(("factor", "f4"), ("shift", "f4")),
        ("kv", KV_MEMORY),
    ],
    align=True,
)
"""`Operation` of native/program.h, which says what a field is for each code."""
assert OPERATION.itemsize == OPERATION_BYTES
NOWHERE = (-1, 0, 0)
CACHE_LINE = 64


class Program:
    """Operations, and the memory that they work in. One step at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        operations: np.ndarray,
        row_bytes: list[int],
        result: int,
        dtype: torch.dtype,
        given: int | None = None,
    ) -> None:
        assert operations.dtype == OPERATION
        self.operations = operations
        self._run, self._operations_at = library.calls.run, operations.ctypes.data
        self._row_bytes, self._dtype = row_bytes, dtype
        self._width = row_bytes[result] // dtype.itemsize
        self._result, self._given = result, given
        self._room = torch.empty(0, dtype=torch.uint8)
        self._at: list[int] = []
        """Where each buffer begins in `_room`."""
        self._buffers = np.zeros(len(row_bytes), np.int64)
        self._buffers_at = self._buffers.ctypes.data
        self._tokens = 0
        self._found = 0, torch.empty(0, self._width, dtype=dtype)
        """Tokens and result of the last step; a step of as many tokens has the same."""

    def __call__(self, batch: Batch, given_TH: Tensor | None = None) -> Tensor:
        """Hidden states of all tokens of `batch`, (T, H); valid until the next call.

        `given_TH` are the rows that the program is given, if any; no result of its own.
        """
        tokens = sum(batch.query_lens)
        self._make_room(tokens)
        if given_TH is not None:
            self._give(given_TH)
        lens = np.array((batch.query_lens, batch.context_lens), np.int64)
        query_lens_at, sequences = lens.ctypes.data, lens.shape[1]
        groups = np.array(
            [
                (address(slots_T), address(tables_SB), tables_SB.shape[1])
                for slots_T, tables_SB in zip(batch.slots_GT, batch.block_tables_GSB, strict=True)
            ],
            np.int64,
        )
        self._run(
            *(self._operations_at, len(self.operations)),
            *(tokens, sequences, address(batch.token_ids_T), address(batch.positions_T)),
            *(query_lens_at, query_lens_at + lens.strides[0]),
            *(groups.ctypes.data, self._buffers_at),
        )
        return self._result_of(tokens)

    def over(self, x_TH: Tensor) -> Tensor:
        """The same of a program of given rows, which are dense: its result for these."""
        tokens = len(x_TH)
        self._make_room(tokens)
        self._give(x_TH)
        self._run(
            *(self._operations_at, len(self.operations), tokens, 0),
            *(0, 0, 0, 0, 0, self._buffers_at),
        )
        return self._result_of(tokens)

    def _give(self, x_TH: Tensor) -> None:
        assert self._given is not None and x_TH.is_contiguous() and x_TH.dtype == self._dtype
        self._buffers[self._given] = address(x_TH)

    def _result_of(self, tokens: int) -> Tensor:
        if self._found[0] != tokens:
            begin = self._at[self._result]
            size = tokens * self._width * self._dtype.itemsize
            rows = self._room[begin : begin + size].view(self._dtype)
            self._found = tokens, rows.view(tokens, self._width)
        return self._found[1]

    def _make_room(self, tokens: int) -> None:
        """Room for so many tokens; each buffer begins at a cache line."""
        if tokens <= self._tokens:
            return
        sizes = [-(-tokens * width // CACHE_LINE) * CACHE_LINE for width in self._row_bytes]
        self._room = torch.empty(sum(sizes) + CACHE_LINE, dtype=torch.uint8)
        begin = -address(self._room) % CACHE_LINE
        self._at = (begin + np.cumsum([0, *sizes[:-1]])).tolist()
        self._buffers[:] = [address(self._room) + at for at in self._at]
        self._tokens = tokens
        self._found = 0, torch.empty(0, self._width, dtype=self._dtype)
