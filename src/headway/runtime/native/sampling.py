"""Sampling in native code: masks, filters, draws and log-probabilities, row by row, unsorted.

With the same random numbers, the same thresholds and masses in double, the tokens are those of
`sampler.py` in torch. That is the definition, and samples batches that are undecided here, for
example with a NaN logit.
"""

import numpy as np
import torch
from torch import Tensor

from headway.runtime.native.library import TYPES, NativeLibrary

DRAW = np.dtype(
    [
        *(("logits", "u8"), ("allowed", "u8")),
        *(("seed", "u8"), ("index", "u8"), ("position", "u8")),
        *(("temperature", "f4"), ("log_min_p", "f4"), ("top_p", "f4"), ("top_k", "i4")),
        ("type", "i4"),
    ],
    align=True,
)
"""`Draw` of native/table.h: the sampling inputs of one row."""
assert DRAW.fields is not None and (DRAW.itemsize, DRAW.fields["type"][1]) == (64, 56)
UNDECIDED = -1


class NativeSampling:
    """The native calls and their scratch memory."""

    def __init__(self, library: NativeLibrary) -> None:
        self._calls = library.calls
        self._scratch = np.empty(0, np.uint8)

    def can_sample(self, logits_RV: Tensor) -> bool:
        """Return whether the kernels can read these logits."""
        on_cpu = logits_RV.device.type == "cpu" and logits_RV.dtype in TYPES
        return bool(on_cpu and logits_RV.is_contiguous() and logits_RV.shape[1] > 0)

    def sample(self, draws_R: np.ndarray, vocabulary: int, mask_bytes: int) -> list[int] | None:
        """Return one token for each row; None if a row has to be sampled by the reference."""
        tokens_R = np.empty(len(draws_R), np.int64)
        self._calls.sample(
            draws_R.ctypes.data,
            len(draws_R),
            vocabulary,
            mask_bytes,
            self._scratch_address(vocabulary),
            tokens_R.ctypes.data,
        )
        tokens: list[int] = tokens_R.tolist()
        return None if UNDECIDED in tokens else tokens

    def logprobs(
        self, logits_RV: Tensor, token_ids: list[int], count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return (log-probabilities of token and alternatives, ranks, alternatives).

        The shapes are (R, 1 + count), (R) and (R, count); None for an undecided row.
        """
        rows, vocabulary = logits_RV.shape
        tokens_R = np.array(token_ids, np.int64)
        values = np.empty((rows, 1 + count), np.float32)
        ranks_R, top_tokens = np.empty(rows, np.int64), np.empty((rows, count), np.int64)
        self._calls.logprobs(
            logits_RV.data_ptr(),
            TYPES[logits_RV.dtype],
            rows,
            vocabulary,
            tokens_R.ctypes.data,
            count,
            self._scratch_address(vocabulary),
            values.ctypes.data,
            ranks_R.ctypes.data,
            top_tokens.ctypes.data,
        )
        return None if (ranks_R == 0).any() else (values, ranks_R, top_tokens)

    def _scratch_address(self, vocabulary: int) -> int:
        """Return the address of scratch memory for all threads, aligned to 8 bytes."""
        needed = self._calls.sampling_bytes(vocabulary)
        if self._scratch.nbytes < needed:
            self._scratch = np.empty(needed, np.uint8)
        return int(self._scratch.ctypes.data)


def sampling_is_right(library: NativeLibrary) -> bool:
    """Return whether the likeliest token, draws between two tokens and log-softmax are right."""
    draw = torch.Generator().manual_seed(2)
    native = NativeSampling(library)
    logits_RV = torch.randn(3, 333, generator=draw) * 3
    tops = logits_RV.topk(2)
    draws_R = np.zeros(3, DRAW)
    draws_R["logits"] = [row.data_ptr() for row in logits_RV]
    draws_R["log_min_p"], draws_R["top_p"], draws_R["top_k"] = -np.inf, 1, 2
    if native.sample(draws_R, 333, 0) != tops.indices[:, 0].tolist():
        return False
    draws_R["temperature"] = 0.8
    drawn = native.sample(draws_R, 333, 0)
    if drawn is None or not (tops.indices == torch.tensor(drawn)[:, None]).any(-1).all():
        return False
    logprobs = native.logprobs(logits_RV, [0, 1, 2], 2)
    values = logits_RV.log_softmax(-1)
    expected = torch.cat((values[:, :3].diag()[:, None], values.topk(2).values), 1)
    return logprobs is not None and np.allclose(logprobs[0], expected.numpy(), rtol=1e-4, atol=1e-4)
