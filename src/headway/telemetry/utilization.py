"""How much of the machine's ceilings some steps used: MFU, MBU and the place under the roofline.

Given the model's dimensions and sums over steps it computes the bytes that had to be read (weights
once a step, KV of every row, as far as its window reaches) and the FLOPs that had to be done.
`Work` knows the model, `Roof` the machine.
"""

from dataclasses import dataclass

from headway.core.model_spec import DTYPE_BYTES, ModelSpec
from headway.core.plan import Ceilings
from headway.telemetry.formulas import ratio, roofline_s, utilization
from headway.telemetry.snapshot import Utilization
from headway.telemetry.windows import StepSums

CACHE_RESIDENT_FACTOR = 2
MIN_RAISE_S = 0.5
"""Steps must have taken this long before a ratio above 1 raises a ceiling."""


class Work:
    """What steps of one model must read and compute, in the type it runs with.

    `bytes_per_weight` is that of rounded weights, 0: that of the type; `kv_dtype` "" is the type.
    `kv_read` is the share of keys that a decode reads where layers choose, `kv_keep` that of a
    prompt that is kept where they choose at its end.
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
        """Of a sequence that decodes: its states are read and written."""
        self.kv_bytes = [
            group.bytes_read_per_token(self.kv_dtype, kv_read, kv_keep) for group in spec.kv_groups
        ]
        share = (bytes_per_weight or DTYPE_BYTES[dtype]) / DTYPE_BYTES[dtype]
        self.weight_bytes = round(spec.step_weight_bytes(dtype) * share)
        self._dense_bytes = round(spec.step_weight_bytes(dtype, experts_read=0) * share)
        self._expert_bytes = round(spec.expert_parameters * DTYPE_BYTES[dtype] * share)

    def num_bytes(self, steps: StepSums) -> float:
        """Weights once a step, experts as often as they were hit, and the KV that was read."""
        pairs = zip(self.kv_bytes, steps.kv_tokens_read, strict=True)
        kv = sum(size * tokens for size, tokens in pairs)
        kv += self.state_bytes * steps.num_decode_tokens
        if not steps.experts_read:
            return steps.count * self.weight_bytes + kv
        return steps.count * self._dense_bytes + steps.experts_read * self._expert_bytes + kv

    def flops(self, steps: StepSums) -> float:
        """Of all their tokens, at the mean context they saw."""
        if not steps.num_tokens:
            return 0.0
        context = round(steps.attended_tokens / steps.num_tokens)
        return self.spec.flops(steps.num_tokens, context, steps.num_sampled)


@dataclass(slots=True)
class Roof:
    """The ceilings in use: the best of the probes, raised by any ratio above 1 that lasted.

    `raised` counts how often. A cache-resident model says nothing about the memory's bandwidth, so
    it has no MBU and raises no bandwidth.
    """

    ceilings: Ceilings
    cache_resident: bool = False
    raised: int = 0

    def take(self, ceilings: Ceilings) -> None:
        """Take new probes; what was raised stays."""
        best = self.ceilings
        ceilings.bandwidth_bytes_per_s = max(
            ceilings.bandwidth_bytes_per_s, best.bandwidth_bytes_per_s
        )
        ceilings.flops_per_s = max(ceilings.flops_per_s, best.flops_per_s)
        self.ceilings = ceilings

    def judge_residence(self, weight_bytes: int) -> None:
        """Whether the weights are smaller than twice the last-level cache."""
        self.cache_resident = weight_bytes < CACHE_RESIDENT_FACTOR * self.ceilings.cache_bytes

    def place(self, work: Work, steps: StepSums) -> Utilization | None:
        """Where these steps lie under the ceilings; None without steps."""
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
        """What steps really reached is possible: the probes were too low."""
        self.raised += 1
        ceilings = self.ceilings
        ceilings.flops_per_s = max(ceilings.flops_per_s, flops_per_s)
        if not self.cache_resident:
            bandwidth = max(ceilings.bandwidth_bytes_per_s, bytes_per_s)
            ceilings.bandwidth_bytes_per_s = bandwidth
