"""Measure the ceilings of this machine: memory bandwidth and dense FLOP/s.

`run` measures both for a while and stores the best figure of all runs, because the bandwidth of a
small machine varies by a factor of two within a minute. It reads the model's weights, up to 512
MiB, where they are larger than the caches, and so allocates nothing: a virtual machine may have
more of a shared cache than its share (one read 128 MiB at 55 GB/s and 512 MiB at 30). Native
kernels read and multiply where they run, else torch. On two cores of a Zen 3: 21 GB/s, 80 GFLOP/s
in fp32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.config.resolve import Settings
from headway.core.clock import SystemClock
from headway.core.machine import Machine, cache_share_bytes, processor_name
from headway.core.plan import Ceilings
from headway.runtime.kernels import Kernels

QUICK_SIZE, CPU_SIZE, CUDA_SIZE = 512, 1024, 8192
"""Sizes of the square GEMM. The native one ends within 3 ms: a busy machine rarely leaves 30."""
CACHES_READ = 2.5
"""Bytes read, as a multiple of the last-level cache: few are still cached at the next read."""
MIN_READ_BYTES, CUDA_READ_BYTES, MAX_READ_BYTES = 64 * 2**20, 2**30, 512 * 2**20
"""Bounds of one read; a GPU reads 1 GiB within a millisecond, so less would be noise."""
ENOUGH_RUNS, IMPROVEMENT = 5, 0.99
"""A measurement ends after this many runs in a row that improve the best by less than 1%."""
KERNEL_TYPES = dict.fromkeys(("onednn-packed", "onednn", "upcast", "native"), "float32")
"""Type in which a linear kernel multiplies, where it is not that of the weights."""
TERA = 1e12
DATASHEETS: list[tuple[str, float, float, float]] = [
    ("B200", 7.7, 2250, 75),
    ("H200", 4.8, 989, 67),
    ("H100 PCIe", 2.0, 756, 51),
    ("H100 NVL", 3.9, 835, 60),
    ("H100", 3.35, 989, 67),
    ("A100-SXM4-40GB", 1.555, 312, 19.5),
    ("A100-PCIE-40GB", 1.555, 312, 19.5),
    ("A100 80GB PCIe", 1.935, 312, 19.5),
    ("A100", 2.039, 312, 19.5),
    ("L40S", 0.864, 362, 91.6),
    ("L40", 0.864, 181, 90.5),
    ("L4", 0.3, 121, 30.3),
    ("A10G", 0.6, 70, 31.2),
    ("A10", 0.6, 125, 31.2),
    ("RTX 4090", 1.008, 165, 82.6),
    ("RTX 3090", 0.936, 71, 35.6),
    ("T4", 0.32, 65, 8.1),
    ("V100", 0.9, 125, 15.7),
]
"""(part of the name, TB/s, dense TFLOP/s in fp16 and bf16, in fp32): data sheets of accelerators.

The first match counts. Marketing peaks with 2:4 sparsity are twice the dense ones. A CPU depends on
its memory slots and clocks, so it has no row.
"""


class DeviceProbe:
    """Measures the ceilings of one executor's device, for its threads and kernels."""

    def __init__(
        self, kernels: Kernels, settings: Settings, machine: Machine, weights: list[Tensor]
    ) -> None:
        cuda = machine.accelerator if settings.device == "cuda" else None
        chosen = kernels.reasons.get("linear", ("", ""))[0]
        dtype = KERNEL_TYPES.get(chosen, settings.dtype)
        self._linear, self._operand = kernels.linear, dtype
        own = settings.quantization.main.at_load
        if own in kernels.quantized:
            dtype = "int8"
            self._linear = kernels.quantized[own]
        self.name = cuda.name if cuda else processor_name()
        bandwidth, flops = datasheet(self.name, dtype)
        self.ceilings = Ceilings(
            flops_dtype=dtype,
            datasheet_bandwidth_bytes_per_s=bandwidth,
            datasheet_flops_per_s=flops,
            cache_bytes=cuda_cache_bytes() if cuda else cache_share_bytes(),
        )
        self._device, self._library = settings.device, kernels.library
        quick = settings.threads == 1 or kernels.library is not None
        self._size = CUDA_SIZE if cuda else QUICK_SIZE if quick else CPU_SIZE
        enough = max(int(CACHES_READ * self.ceilings.cache_bytes), MIN_READ_BYTES)
        self._buffer_bytes = CUDA_READ_BYTES if cuda else enough
        most = max(self._buffer_bytes, MAX_READ_BYTES)
        self._words = as_words(weights, self._buffer_bytes, most)
        self._operands: tuple[Tensor, Tensor] | None = None
        self._clock = SystemClock()

    def run(self, budget_s: float) -> None:
        """Divide `budget_s` between the measurements; with 0 run the next one once.

        For a model that is too small to read, a buffer is read in the first run alone.
        """
        works = self._gemms()
        num_bytes = sum(tensor.nbytes for tensor in self._words)
        if self._words:
            works.append(("bandwidth_bytes_per_s", num_bytes, lambda: self._read(self._words)))
        elif budget_s and not self.ceilings.bandwidth_bytes_per_s:
            num_words = min(self._buffer_bytes, MAX_READ_BYTES) // 4
            buffer = torch.ones(num_words, device=self._device)
            works.append(("bandwidth_bytes_per_s", buffer.nbytes, lambda: self._read([buffer])))
        if not budget_s:
            works = [works[self.ceilings.num_probes % len(works)]]
        self.ceilings.last_share = 1.0
        for name, amount, work in works:
            rate = amount / self._best_s(work, budget_s / len(works))
            best = max(getattr(self.ceilings, name), rate)
            setattr(self.ceilings, name, best)
            self.ceilings.last_share = min(self.ceilings.last_share, rate / best)
        self.ceilings.num_probes += 1

    def _read(self, tensors: list[Tensor]) -> None:
        for words in tensors:
            if self._library is None:
                words.sum()
            else:
                self._library.calls.read_words(words.data_ptr(), words.nbytes)

    def _gemms(self) -> list[tuple[str, int, Callable[[], object]]]:
        """Return the GEMM of the kernel and, without native kernels, that of torch."""
        linear = self._linear
        if self._operands is None:
            dtype = getattr(torch, self._operand)
            x = torch.full((self._size, self._size), 0.5, dtype=dtype, device=self._device)
            self._operands = x, linear.prepare(x)
        x, weight = self._operands
        works: list[Callable[[], object]] = [lambda: linear(x, weight, None)]
        if self._library is None and isinstance(weight, Tensor):
            works.append(lambda: x @ x)
        return [("flops_per_s", 2 * self._size**3, work) for work in works]

    def _best_s(self, work: Callable[[], object], budget_s: float) -> float:
        """Return the seconds of the fastest run; ends with the budget or without improvement."""
        started_s, best_s, since = self._clock.now_s(), float("inf"), 0
        while since < ENOUGH_RUNS:
            before_s = self._clock.now_s()
            work()
            if self._device == "cuda":
                torch.cuda.synchronize()
            now_s = self._clock.now_s()
            since = 0 if now_s - before_s < best_s * IMPROVEMENT else since + 1
            best_s = min(best_s, now_s - before_s)
            if now_s - started_s > budget_s:
                break
        return best_s


def use_threads(settings: Settings, kernels: Kernels) -> None:
    """Limit torch to the calling thread where native kernels have their own threads.

    Two pools that spin on the same cores make both 3 to 12 times slower.
    """
    torch.set_num_threads(settings.threads if kernels.library is None else 1)


def as_words(weights: list[Tensor], enough_bytes: int, most_bytes: int) -> list[Tensor]:
    """Return the largest weights as fp32 words, about `most_bytes`; [] below `enough_bytes`.

    Two bf16 or fp16 numbers read as one fp32 number are normal numbers, so the sum is not slowed.
    """
    words: list[Tensor] = []
    for weight in sorted(weights, key=lambda tensor: tensor.nbytes, reverse=True):
        if sum(tensor.nbytes for tensor in words) >= most_bytes:
            return words
        if weight.is_contiguous() and weight.nbytes % 4 == 0:
            words.append(weight.view(-1).view(torch.float32))
    return words if sum(tensor.nbytes for tensor in words) >= enough_bytes else []


def cuda_cache_bytes() -> int:
    """Return the bytes of the GPU's last-level cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def datasheet(name: str, dtype: str) -> tuple[float | None, float | None]:
    """Return (bytes/s, FLOP/s in `dtype`) of a device by its name; (None, None) if unknown."""
    for part, bandwidth, half, single in DATASHEETS:
        if part in name:
            return bandwidth * TERA, (single if dtype == "float32" else half) * TERA
    return None, None
