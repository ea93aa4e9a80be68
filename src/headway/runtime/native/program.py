"""The forward of a model as a list of operations that one native call runs; see native/program.h.

A program has fixed operations, widths of the rows of each buffer, and the buffer of the result. Its
result has the bits of the same operations called one by one; its memory is reused from step to
step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.runtime.batch import Batch
from headway.runtime.native.available import NUM_CODES, OPERATION_BYTES
from headway.runtime.native.library import NativeLibrary, address

CODES = (
    *("embed", "norm", "linear", "quantized", "rope", "gated", "add"),
    *("write_kv", "attention", "round_kv", "widen"),
)
PLACE = np.dtype([("buffer", "i4"), ("first", "i4"), ("step", "i4")])
KV_MEMORY = np.dtype(
    [
        *((name, "u8") for name in ("k", "v", "k_scale", "v_scale", "bounds")),
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
        *((name, "i8") for name in ("open_group", "window", "sinks")),
        *(("factor", "f4"), ("shift", "f4")),
        *(("kv", KV_MEMORY), ("open", KV_MEMORY)),
    ],
    align=True,
)
"""`Operation` of native/program.h, which defines the fields for each code."""
assert OPERATION.itemsize == OPERATION_BYTES and len(CODES) == NUM_CODES
NOWHERE = (-1, 0, 0)
CACHE_LINE = 64


class Pause(NamedTuple):
    """A call of Python before operation `at`, which exchanges rows between ranks.

    It computes the rows of buffer `y` from columns of buffer `x`; `first` and `step` are as in
    `PLACE`.
    """

    at: int
    x: int
    first: int
    step: int
    y: int
    width: int
    work: Callable[[Tensor, Batch], Tensor]


class Program:
    """Operations and their memory, for one step at a time.

    The result has `width` numbers of `result_dtype` for each row, in a buffer that may be wider.
    Given rows have `dtype`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        operations: np.ndarray,
        row_bytes: list[int],
        result: int,
        width: int,
        dtype: torch.dtype,
        result_dtype: torch.dtype,
        given: int | None = None,
        pauses: Sequence[Pause] = (),
    ) -> None:
        assert operations.dtype == OPERATION
        self.operations = operations
        self._run, self._operations_at = library.calls.run, operations.ctypes.data
        self._row_bytes, self._dtype = row_bytes, dtype
        self._result_dtype = result_dtype
        self._width = width
        self._result, self._given, self._pauses = result, given, pauses
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._buffer_begins: list[int] = []
        """Offset of each buffer in `_memory`."""
        self._buffers = np.zeros(len(row_bytes), np.int64)
        self._buffers_at = self._buffers.ctypes.data
        self._tokens = 0
        self._last_result = 0, torch.empty(0, self._width, dtype=result_dtype)
        """Tokens and result tensor of the last step; a step of as many tokens returns it again."""

    def __call__(self, batch: Batch, given_TH: Tensor | None = None) -> Tensor:
        """Return the hidden states of all tokens of `batch`, (T, H); valid until the next call.

        `given_TH` are the given rows, if the program reads some; they are not its own result.
        """
        tokens = sum(batch.query_lens)
        self._reserve(tokens)
        if given_TH is not None:
            self._give(given_TH)
        own_lens = batch.own_lens_GS or [batch.context_lens]
        lens = np.array((batch.query_lens, *own_lens), np.int64)
        query_lens_at, sequences = lens.ctypes.data, lens.shape[1]
        parts = zip(batch.slots_GT, batch.block_tables_GSB, strict=True)
        groups = np.array(
            [
                (
                    *(address(slots_T), address(tables_SB), tables_SB.shape[1]),
                    query_lens_at + lens.strides[0] * (1 + min(group, len(own_lens) - 1)),
                )
                for group, (slots_T, tables_SB) in enumerate(parts)
            ],
            np.int64,
        )
        begin = 0
        for pause in (*self._pauses, None):
            end = len(self.operations) if pause is None else pause.at
            self._run(
                *(self._operations_at + begin * OPERATION_BYTES, end - begin),
                *(tokens, sequences, address(batch.token_ids_T), address(batch.rope_rows)),
                query_lens_at,
                *(groups.ctypes.data, self._buffers_at, address(batch.reads_T)),
            )
            if pause is not None:
                own_TH = self._rows(pause.x, tokens, pause.step, self._dtype)
                own_TH = own_TH[:, pause.first : pause.first + pause.width]
                made_TH = pause.work(own_TH, batch)
                self._rows(pause.y, tokens, pause.width, self._dtype).copy_(made_TH)
            begin = end
        return self._result_of(tokens)

    @property
    def num_calls(self) -> int:
        """Number of native calls of a step."""
        return len(self._pauses) + 1

    def run_rows(self, x_TH: Tensor) -> Tensor:
        """Return the result of a program of given rows alone; `x_TH` is dense."""
        tokens = len(x_TH)
        self._reserve(tokens)
        self._give(x_TH)
        self._run(
            *(self._operations_at, len(self.operations), tokens, 0),
            *(0, 0, 0, 0, self._buffers_at, 0),
        )
        return self._result_of(tokens)

    def _give(self, x_TH: Tensor) -> None:
        assert self._given is not None and x_TH.is_contiguous() and x_TH.dtype == self._dtype
        self._buffers[self._given] = address(x_TH)

    def _result_of(self, tokens: int) -> Tensor:
        if self._last_result[0] != tokens:
            rows = self._rows(self._result, tokens, self._width, self._result_dtype)
            self._last_result = tokens, rows
        return self._last_result[1]

    def _rows(self, buffer: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of a buffer with one value, (tokens, width)."""
        begin, size = self._buffer_begins[buffer], tokens * width * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(tokens, width)

    def _reserve(self, tokens: int) -> None:
        """Allocate buffers for `tokens` tokens; each begins at a cache line."""
        if tokens <= self._tokens:
            return
        sizes = [-(-tokens * width // CACHE_LINE) * CACHE_LINE for width in self._row_bytes]
        self._memory = torch.empty(sum(sizes) + CACHE_LINE, dtype=torch.uint8)
        begin = -address(self._memory) % CACHE_LINE
        self._buffer_begins = (begin + np.cumsum([0, *sizes[:-1]])).tolist()
        self._buffers[:] = [address(self._memory) + at for at in self._buffer_begins]
        self._tokens = tokens
        self._last_result = 0, torch.empty(0, self._width, dtype=self._result_dtype)
