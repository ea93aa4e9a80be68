"""The floor of a decode step, and what the step would take with more rows.

Bytes and FLOPs of added rows cost as much over their floor as the step does now. Worked example: a
step of 38 ms at 3 rows reads 500 MB of weights and 80 MB of KV at 17 GB/s, a floor of 34.1 ms. At 6
rows it reads 80 MB more, 4.7 ms, which take 5.2 as now: 43.2 ms.
"""

from dataclasses import dataclass

from headway.advise.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A mean decode step: measured seconds, and what it must read and compute."""

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
        """Return the least time at `rows`, with weights and KV of these shares of their bytes."""
        rows = self.rows if rows is None else rows
        read = self.weight_bytes * weights + rows * self.kv_bytes_per_row * kv
        computing_s = rows * self.flops_per_row / self.flops if self.flops else 0.0
        return max(read / self.bandwidth, computing_s)

    def with_rows(self, rows: float) -> float:
        """Return the step's seconds at `rows`, never below their floor."""
        now_s, then_s = self.floor_s(), self.floor_s(rows)
        more_s = then_s - now_s
        if more_s > 0:
            more_s *= max(self.seconds / now_s, 1.0)
        return max(self.seconds + more_s, then_s)

    def saved_share(self, weights: float = 1.0, kv: float = 1.0) -> float:
        """Return by how much the floor falls with such weights and KV, as a share of the step."""
        return (self.floor_s() - self.floor_s(weights=weights, kv=kv)) / self.seconds

    def speedup(self, rows: float) -> float:
        """Tokens per second at `rows` over those now: 3 rows in 38 ms, 8 in 47 ms: 2.2."""
        return (rows / self.with_rows(rows)) / (self.rows / self.seconds)


def decode_step(reading: Reading) -> DecodeStep | None:
    """The mean decode step; None where the source does not tell or the weights stay in cache.

    What steps reach the machine can do: a ceiling that was measured lower was measured in a bad
    moment.
    """
    steps, seconds = reading.steps.decode, reading.steps.decode_step_s
    weights, machine = reading.weights.step_bytes, reading.machine
    if steps is None or not seconds or not weights or not machine.bandwidth:
        return None
    if reading.weights.cache_resident:
        return None
    rows = max(reading.steps.rows or 1.0, 1.0)
    kv = max(steps.bytes_per_s * seconds - weights, 0.0)
    return DecodeStep(
        seconds=seconds,
        rows=rows,
        weight_bytes=weights,
        kv_bytes_per_row=kv / rows,
        flops_per_row=steps.flops_per_s * seconds / rows,
        bandwidth=max(machine.bandwidth, steps.bytes_per_s),
        flops=max(machine.flops, steps.flops_per_s) if machine.flops else None,
    )
