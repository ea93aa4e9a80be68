"""Utilization of the machine's ceilings by some steps: MFU, MBU and the roofline.

From the model's dimensions and sums over steps it computes the bytes that had to be read (weights
once a step, KV of every row within its window) and the FLOPs that had to be done. `ModelWork` holds
the work of a model, `Roof` the ceilings of a machine, and `DataSheetRow` what a maker publishes of
an accelerator.

Added rows of a decode step exceed their lower bound by the same factor as the step does. Worked
example: a step of 38 ms at 3 rows reads 500 MB of weights and 80 MB of KV at 17 GB/s, a bound of
34.1 ms. At 6 rows it reads 80 MB more, 4.7 ms, which become 5.2 by that factor: 43.2 ms.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from headway.core.errors import UsageError
from headway.core.plan import Ceilings
from headway.core.regular_file import open_text
from headway.spec import DTYPE_BYTES, ModelSpec

CACHE_RESIDENT_FACTOR = 2
MIN_RAISE_S = 0.5
"""Minimum duration of steps whose ratio above 1 raises a ceiling."""


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole; None without a whole."""
    return part / whole if whole > 0 else None


def utilization(needed: float, seconds: float, peak_per_s: float) -> float | None:
    """Return MBU of bytes or MFU of FLOPs: needed / time / peak, never clamped.

    7e9 parameters in 2 bytes, 100 times a second, on 2 TB/s: 1.4e12 / 1 / 2e12 = 0.7.
    """
    return ratio(needed, seconds * peak_per_s)


def roofline_s(num_bytes: float, flops: float, bandwidth: float, peak_flops: float) -> float:
    """Return the minimum seconds by the two ceilings; a ceiling of 0 does not count."""
    moving = num_bytes / bandwidth if bandwidth else 0.0
    return max(moving, flops / peak_flops if peak_flops else 0.0)


class Utilization(msgspec.Struct, kw_only=True):
    """Utilization by some steps: needed work over their time, against the measured ceilings.

    `roofline` = the minimum time by the two ceilings / the actual time. A ratio above 1 is shown as
    it is, with `above_ceiling`. None without ceilings; `mbu` also for cache-resident models.
    `flops_per_byte` over `flops_per_s` is the working point of the roofline plot.
    """

    num_steps: int
    time_s: float
    flops_per_s: float
    bytes_per_s: float
    flops_per_byte: float
    mfu: float | None
    mbu: float | None
    roofline: float | None
    above_ceiling: bool


class StepTotals(Protocol):
    """Sums over some steps, named as in `StepRecord`."""

    count: int
    num_tokens: int
    num_decode_tokens: int
    num_sampled: int
    attended_tokens: int
    experts_read: int
    kv_tokens_read: list[int]

    @property
    def duration_s(self) -> float: ...


class ModelWork:
    """Bytes and FLOPs that steps of one model need, in the type it runs with.

    `bytes_per_weight` is that of quantized weights, 0: that of the type; `kv_dtype` "" is the type.
    `kv_read` is the share of keys that a decode reads in layers that choose, `kv_keep` the share of
    a prompt that layers keep which choose at its end.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str,
        kv_dtype: str = "",
        bytes_per_weight: float = 0.0,
        kv_read: float = 1.0,
        kv_keep: float = 1.0,
    ) -> None:
        self.spec, self.dtype, self.kv_dtype = spec, dtype, kv_dtype or dtype
        self.state_bytes = 2 * spec.slot_bytes
        """Bytes of states that a decoding sequence reads and writes."""
        self.kv_bytes = [
            group.bytes_read_per_token(self.kv_dtype, kv_read, kv_keep) for group in spec.kv_groups
        ]
        share = (bytes_per_weight or DTYPE_BYTES[dtype]) / DTYPE_BYTES[dtype]
        self.weight_bytes = round(spec.step_weight_bytes(dtype) * share)
        self._dense_bytes = round(spec.step_weight_bytes(dtype, experts_read=0) * share)
        self._expert_bytes = round(spec.expert_parameters * DTYPE_BYTES[dtype] * share)

    def num_bytes(self, steps: StepTotals) -> float:
        """Return the bytes of weights per step, of used experts, and of the KV that was read."""
        pairs = zip(self.kv_bytes, steps.kv_tokens_read, strict=True)
        kv = sum(size * tokens for size, tokens in pairs)
        kv += self.state_bytes * steps.num_decode_tokens
        if not steps.experts_read:
            return steps.count * self.weight_bytes + kv
        return steps.count * self._dense_bytes + steps.experts_read * self._expert_bytes + kv

    def flops(self, steps: StepTotals) -> float:
        """Return the FLOPs of all tokens, at their mean context."""
        if not steps.num_tokens:
            return 0.0
        context = round(steps.attended_tokens / steps.num_tokens)
        return self.spec.flops(steps.num_tokens, context, steps.num_sampled)


@dataclass(slots=True)
class Roof:
    """Ceilings in use: the best of the probes, raised by any lasting ratio above 1.

    `raised` counts how often. A cache-resident model says nothing about the memory's bandwidth, so
    it has no MBU and raises no bandwidth.
    """

    ceilings: Ceilings
    cache_resident: bool = False
    raised: int = 0

    def take(self, ceilings: Ceilings) -> None:
        """Take new probes; raised ceilings stay."""
        best = self.ceilings
        ceilings.bandwidth_bytes_per_s = max(
            ceilings.bandwidth_bytes_per_s, best.bandwidth_bytes_per_s
        )
        ceilings.flops_per_s = max(ceilings.flops_per_s, best.flops_per_s)
        self.ceilings = ceilings

    def judge_residence(self, weight_bytes: int) -> None:
        """Determine whether the weights are smaller than twice the last-level cache."""
        self.cache_resident = weight_bytes < CACHE_RESIDENT_FACTOR * self.ceilings.cache_bytes

    def place(self, work: ModelWork, steps: StepTotals) -> Utilization | None:
        """Return the utilization of these steps; None without steps."""
        seconds = steps.duration_s
        if not steps.count or seconds <= 0:
            return None
        num_bytes, flops = work.num_bytes(steps), work.flops(steps)
        ceilings = self.ceilings
        bandwidth = 0.0 if self.cache_resident else ceilings.bandwidth_bytes_per_s
        mfu = utilization(flops, seconds, ceilings.flops_per_s)
        mbu = utilization(num_bytes, seconds, bandwidth)
        least_s = roofline_s(num_bytes, flops, bandwidth, ceilings.flops_per_s)
        above = max(mfu or 0.0, mbu or 0.0) > 1
        if above and seconds >= MIN_RAISE_S:
            self._raise(flops / seconds, num_bytes / seconds)
        return Utilization(
            num_steps=steps.count,
            time_s=seconds,
            flops_per_s=flops / seconds,
            bytes_per_s=num_bytes / seconds,
            flops_per_byte=flops / num_bytes,
            mfu=mfu,
            mbu=mbu,
            roofline=ratio(least_s, seconds) if least_s else None,
            above_ceiling=above,
        )

    def _raise(self, flops_per_s: float, bytes_per_s: float) -> None:
        """Raise the ceilings to rates that steps have reached: the probes were too low."""
        self.raised += 1
        ceilings = self.ceilings
        ceilings.flops_per_s = max(ceilings.flops_per_s, flops_per_s)
        if not self.cache_resident:
            bandwidth = max(ceilings.bandwidth_bytes_per_s, bytes_per_s)
            ceilings.bandwidth_bytes_per_s = bandwidth


# ── decode steps with more rows ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Mean decode step: measured seconds, and its bytes and FLOPs."""

    seconds: float
    rows: float
    weight_bytes: float
    kv_bytes_per_row: float
    flops_per_row: float
    bandwidth: float
    flops: float | None

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.rows * self.kv_bytes_per_row

    def floor_s(self, rows: float | None = None, weights: float = 1.0, kv: float = 1.0) -> float:
        """Return the minimum seconds at `rows`, with these shares of weight and KV bytes."""
        rows = self.rows if rows is None else rows
        read = self.weight_bytes * weights + rows * self.kv_bytes_per_row * kv
        computing_s = rows * self.flops_per_row / self.flops if self.flops else 0.0
        return max(read / self.bandwidth, computing_s)

    def with_rows(self, rows: float) -> float:
        """Return the step's seconds at `rows`, never below their minimum."""
        now_s, then_s = self.floor_s(), self.floor_s(rows)
        more_s = then_s - now_s
        if more_s > 0:
            more_s *= max(self.seconds / now_s, 1.0)
        return max(self.seconds + more_s, then_s)

    def saved_share(self, weights: float = 1.0, kv: float = 1.0) -> float:
        """Return how much the minimum falls with such weights and KV, as a share of the step."""
        return (self.floor_s() - self.floor_s(weights=weights, kv=kv)) / self.seconds

    def speedup(self, rows: float) -> float:
        """Return the factor on tokens per second at `rows`: 3 rows in 38 ms, 8 in 47 ms: 2.2."""
        return (rows / self.with_rows(rows)) / (self.rows / self.seconds)


# ── data sheets ──────────────────────────────────────────────────────────────────────────────


class DataSheetRow(msgspec.Struct, kw_only=True):
    """Row of a data sheet file, a CSV with a header; None for an empty cell."""

    name: str
    memory_gb: float | None
    bandwidth_gb_per_s: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    usd_per_hour: float | None


SHEET_COLUMNS = {
    "memory_gb": "mem_gb",
    "bandwidth_gb_per_s": "mem_bw_gbs",
    "bf16_tflops": "bf16_dense_tflops",
    "fp8_tflops": "fp8_dense_tflops",
    "int8_tops": "int8_dense_tops",
    "usd_per_hour": "price_usd_per_hr_mid",
}


def read_sheets(path: str) -> list[DataSheetRow]:
    """Read all rows; UsageError if the file is not a data sheet."""
    try:
        with open_text(Path(path), newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--accelerators {path}: {error}.", "Check the path.") from error
    if not rows or "accelerator" not in rows[0]:
        raise UsageError(
            f"--accelerators {path}: there is no column accelerator.",
            f"Columns that are read: accelerator, {', '.join(SHEET_COLUMNS.values())}.",
        )
    return [
        DataSheetRow(
            name=row["accelerator"],
            **{field: number(row.get(column)) for field, column in SHEET_COLUMNS.items()},
        )
        for row in rows
    ]


def number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def find_sheet(device: str, sheets: list[DataSheetRow], memory_gb: float) -> DataSheetRow | None:
    """Return the row whose name shares most words with the device's, then the nearest memory.

    "NVIDIA H100 80GB HBM3" finds H100-SXM5-80GB; "AMD EPYC 7763" finds nothing.
    """
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    scored = []
    for sheet in sheets:
        named = re.findall(r"[a-z0-9]+", sheet.name.lower())
        if named and named[0] in words:
            far = abs((sheet.memory_gb or 0.0) - memory_gb)
            scored.append((-len(words & set(named)), far, sheet.name, sheet))
    return min(scored)[-1] if scored else None
