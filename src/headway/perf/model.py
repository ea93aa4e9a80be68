"""Cost model of a step: predicted seconds, learned from the steps that ran.

It starts with a prior (roughly how long weights, tokens and KV take on this machine) and learns
from the record of every step. Predictions are never negative, and never fall when a step gets more
work. The scheduler asks it how large a chunk fits, admission how long a prompt will take. Worked
example, 4 ms to read the weights, 0.1 ms a token beyond 40, 1 µs a KV token read:

    32 decodes of 1,000 tokens each    4 ms + 32 ms of KV           = 36 ms
    the same and a chunk of 128        16 ms + 32 ms + its own KV   = 48 ms

The time is a curve over the number of tokens (piecewise linear; breakpoints are dense where kernels
process a few rows at once, and then at 64, 128, … 16,384) plus a cost for each sampled row,
attended token and KV token read. All are learned together by a Kalman filter on the relative error
(Kalman 1960): the machine's speed, common to all parts, drifts fast, the shape slowly; a part that
no step has shown is the prior's, scaled by the observed speed.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import log
from typing import NamedTuple

import numpy as np

from headway.core.plan import Description
from headway.core.records import ModelSnapshot, RowCounts, StepRecord
from headway.perf.filter import (
    ANY_SAMPLED,
    ATTENDED,
    BREAKPOINTS,
    NUM_BREAKPOINTS,
    NUM_PARTS,
    READ,
    SAMPLED,
    TABLE_TOKENS,
    CurveTable,
    FilterState,
    learner,
    locate,
)
from headway.perf.roofline import ModelWork
from headway.spec import ModelSpec

ERROR_STEPS = 512
"""Number of last steps whose errors count in `StepModel.errors`."""
MIN_PART_S = 1e-12

HOST_BYTES_PER_S = {"cuda": 12e9}
"""Half of the rate of 16 lanes of PCIe 4; on a CPU a copy is a read and a write of memory."""
DEFAULT_CEILINGS = {"cpu": (20e9, 200e9), "cuda": (1e12, 200e12)}
"""Bytes/s and FLOP/s of an unmeasured machine; the first steps correct both."""
HOST_STEP_S, HOST_ROW_S = 3e-4, 1e-5
"""Seconds of the host for a step, and for each sampled row of it."""

STEP_NOISE = 0.08
"""Relative spread of the same step run twice."""
SPEED_STD, SHAPE_STD, UNITS_STD = 1.0, 1.0, 2.0
"""Uncertainty of the prior, in powers of e: of all parts together, of a point of the curve relative
to the others, and of a unit cost."""
SHAPE_CHANGE_STD = 0.4
"""Change of a breakpoint or a unit cost while the speed changes by a factor e."""
CORRELATION_OCTAVES = 2.0
"""Distance in powers of two at which breakpoints share 1/e of their uncertainty."""
FORGETTING = 4e-4
"""Share of the prior's uncertainty that returns with each step: 2% of drift in the speed."""
CLIP_SIGMAS, OUTLIER_INFLATION = 2.0, 0.02
"""Outliers are clipped to 2 sigma, because one may be a hiccup of the machine; the covariance is
inflated by this share of the prior's, so that a persistent change is learned."""


class Work(NamedTuple):
    """Work of a step, counted as by `core.records.counted`; KV summed over groups."""

    num_tokens: int
    num_sampled: int
    attended_tokens: int
    kv_tokens_read: int

    def with_tokens(self, start: int, count: int, num_groups: int, *, sampled: int = 0) -> "Work":
        """Return this work and `count` more tokens from position `start` of one of its rows.

        The row reads its context once. `sampled` more positions are sampled; negative counts take
        tokens out.
        """
        size = abs(count)
        attended = size * start + size * (size + 1) // 2
        return Work(
            self.num_tokens + count,
            self.num_sampled + sampled,
            self.attended_tokens + (attended if count > 0 else -attended),
            self.kv_tokens_read + count * num_groups,
        )


NOTHING = Work(0, 0, 0, 0)


def work_of(starts: list[int], windows: tuple[int, ...]) -> Work:
    """Return the work of decodes whose contexts have these lengths; `windows` by KV group."""
    count, total = len(starts), sum(starts)
    reads = [
        sum([min(start, window - 1) for start in starts]) if window else total for window in windows
    ]
    return Work(count, count, total + count, sum(reads) + count * len(reads))


def work_done(step: StepRecord | RowCounts) -> Work:
    """Return the work of a step that has run."""
    return Work(step.num_tokens, step.num_sampled, step.attended_tokens, sum(step.kv_tokens_read))


MIN_CHUNK_TOKENS = 16
"""Minimum prompt tokens of a step, even without time for them."""


def observed_s(record: StepRecord) -> float:
    """Return the seconds of a step that the model predicts: the step's and the gap before it.

    Drafting and choosing draft tokens are left out. 0 for a step that teaches nothing: it waited
    for grammar masks, copied blocks to or from host memory, or computed nothing.
    """
    if not record.num_tokens or record.mask_wait_s or record.transfer_s:
        return 0.0
    return max(record.duration_s + record.gap_s - record.draft_s - record.choose_s, 0.0)


class Prior(NamedTuple):
    """Seconds before any observation: to read the weights, and per unit of each kind of work."""

    weights_s: float = 0.01
    token_s: float = 1e-3
    any_sampled_s: float = 1e-4
    sampled_s: float = 1e-5
    attended_s: float = 1e-7
    read_s: float = 1e-6
    copied_byte_s: float = 1e-10
    """Per byte between the device's memory and the host's."""


def prior_of(spec: ModelSpec, machine: Description, dtype: str, kv_dtype: str = "") -> Prior:
    """Return the prior by the machine's ceilings; an unmeasured one (0) has a default."""
    ceilings = machine.ceilings
    device = machine.device.partition(":")[0]
    bandwidth, flops_per_s = DEFAULT_CEILINGS.get(device, DEFAULT_CEILINGS["cpu"])
    bandwidth = ceilings.bandwidth_bytes_per_s or bandwidth
    flops_per_s = ceilings.flops_per_s or flops_per_s
    work = ModelWork(spec, dtype, kv_dtype, machine.bytes_per_weight)
    head = spec.embedding_parameters / spec.num_parameters
    return Prior(
        weights_s=(1 - head) * work.weight_bytes / bandwidth,
        token_s=spec.flops(1, 0, 0) / flops_per_s,
        any_sampled_s=head * work.weight_bytes / bandwidth,
        sampled_s=2 * spec.embedding_parameters / flops_per_s + HOST_ROW_S,
        attended_s=spec.num_layers * spec.attended_flops / flops_per_s,
        read_s=sum(work.kv_bytes) / len(work.kv_bytes) / bandwidth,
        copied_byte_s=1 / HOST_BYTES_PER_S.get(device, bandwidth / 2),
    )


class StepModel:
    """Model of the seconds of a step by its work, learned from every step (`observe`).

    `windows` by KV group, 0 for full attention: they bound what a chunk reads.
    """

    def __init__(self, prior: Prior | None = None, windows: tuple[int, ...] = (0,)) -> None:
        self.prior, self.windows = prior or Prior(), windows
        self._errors: deque[float] = deque(maxlen=ERROR_STEPS)
        self._few = CurveTable()
        self.reset()

    def reset(self) -> None:
        """Forget all steps: predict by the prior again."""
        self.num_observed = 0
        self._state = state = FilterState.empty(
            CLIP_SIGMAS, STEP_NOISE, OUTLIER_INFLATION, FORGETTING
        )
        state.logs[:] = np.log(prior_parts(self.prior))
        state.covariance[:] = uncertainty(SPEED_STD, SHAPE_STD, UNITS_STD)
        state.changes[:] = uncertainty(SPEED_STD, SHAPE_CHANGE_STD, SHAPE_CHANGE_STD)
        self._learn = learner(state)
        self._errors.clear()
        self._parts = state.settle()

    def copy_from(self, other: "StepModel") -> None:
        """Copy what `other` has learned."""
        self.num_observed = other.num_observed
        self._state.logs[:] = other._state.logs
        self._state.covariance[:] = other._state.covariance
        self._parts = self._state.settle()

    def __deepcopy__(self, memo: dict[int, object]) -> "StepModel":
        """Return an independent copy of the model."""
        twin = StepModel(self.prior, self.windows)
        twin.copy_from(self)
        return twin

    def set_parts(self, parts: np.ndarray) -> None:
        """Set the seconds of each part: none negative, the curve never falling."""
        self._state.logs[:] = np.log(np.maximum(parts, MIN_PART_S))
        self._parts = self._state.settle()

    # ── predict ─────────────────────────────────────────────────────────────────────────────

    def seconds(self, work: Work) -> float:
        """Return the predicted seconds of a step that does `work`, with the gap before it."""
        tokens, sampled, attended, read = work
        parts, (above, width, beyond) = self._parts, locate(tokens)
        below_s = parts[above - 1]
        curve_s = below_s + (parts[above] - below_s) * beyond / width  # as `_curve`
        seconds = curve_s + parts[ATTENDED] * attended + parts[READ] * read
        if sampled:
            seconds += parts[ANY_SAMPLED] + parts[SAMPLED] * sampled
        return seconds

    def _curve(self, tokens: int) -> float:
        """Return the seconds of the tokens alone: 60 is half-way from the breakpoint 56 to 64."""
        parts = self._parts
        above, width, beyond = locate(tokens)
        below_s = parts[above - 1]
        return below_s + (parts[above] - below_s) * beyond / width

    def add_chunk(self, work: Work, start: int, count: int) -> Work:
        """Return `work` plus a chunk of `count` tokens from `start` that samples its last."""
        if count <= 0:
            return work
        reach = sum([min(start, w - 1) if w else start for w in self.windows]) if start else 0
        return Work(
            work.num_tokens + count,
            work.num_sampled + 1,
            work.attended_tokens + count * start + count * (count + 1) // 2,
            work.kv_tokens_read + reach + count * len(self.windows),
        )

    def with_drafts(self, work: Work, start: int, count: int) -> Work:
        """Return `work` plus `count` draft tokens from position `start`, each of them sampled.

        They read the KV that the decode before them reads: its row has the whole context.
        """
        return work.with_tokens(start, count, len(self.windows), sampled=count)

    def rows_s(self, work: Work, most: int) -> list[float]:
        """Return the seconds that 0, 1, 2 … `most` draft tokens add to a sampling step that does
        `work`, without those of their contexts."""
        tokens, parts = work.num_tokens, self._parts
        row_s = parts[SAMPLED] + parts[READ] * len(self.windows)
        if tokens + most >= TABLE_TOKENS:
            curve_s = [self._curve(tokens + count) for count in range(most + 1)]
        else:
            curve_s = self._few.curve(parts)[tokens : tokens + most + 1]
        alone_s = curve_s[0]
        return [s - alone_s + count * row_s for count, s in enumerate(curve_s)]

    def drafts_s(
        self,
        work: Work,
        drafts: Iterable[tuple[int, int]],
        forced: Iterable[tuple[int, int]] = (),
    ) -> float:
        """Return the seconds of draft tokens and forced tokens, each (first position, count), of a
        step that does `work`."""
        without, groups = work, len(self.windows)
        for start, count in drafts:
            without = without.with_tokens(start, -count, groups, sampled=-count)
        for start, count in forced:
            without = without.with_tokens(start, -count, groups)
        return self.seconds(work) - self.seconds(without)

    def chunk(self, room_s: float, other_work: Work, start: int, most: int) -> int:
        """Return the maximum tokens from `start` that fit into `room_s` with that work; 0: none.

        The chunk's own seconds of c tokens are curve(tokens + c) + c · slope + c² · square.

        >>> StepModel().chunk(0.1, NOTHING, start=0, most=512) > 0
        True
        """
        first_s = self.seconds(self.add_chunk(other_work, start, 1))
        if most <= 0 or first_s > room_s:
            return 0
        tokens, square = other_work.num_tokens, self._parts[ATTENDED] / 2
        slope = square * (2 * start + 1) + self._parts[READ] * len(self.windows)
        room_s -= first_s - self._curve(tokens + 1) - slope - square
        fits, above, middle = 1, most + 1, most
        while above - fits > 1:
            if self._curve(tokens + middle) + middle * (slope + middle * square) <= room_s:
                fits = middle
            else:
                above = middle
            middle = (fits + above) // 2
        return fits

    def token_s(self, step_s: float, other_work: Work, most: int) -> float:
        """Return seconds per prompt token, in steps of `step_s` or of `most` tokens."""
        whole_s = self.seconds(self.add_chunk(other_work, 0, most))
        if whole_s <= step_s:
            return whole_s / most
        chunk = max(self.chunk(step_s, other_work, 0, most), min(MIN_CHUNK_TOKENS, most))
        return self.seconds(self.add_chunk(other_work, 0, chunk)) / chunk

    def predict_prefill_s(
        self, num_tokens: int, start: int, chunk: int, other_work: Work = NOTHING
    ) -> float:
        """Return the seconds of `num_tokens` from `start` in chunks, in addition to decodes."""
        return self.backlog_s([(num_tokens, start)], chunk, other_work)

    def backlog_s(
        self, prompts: Iterable[tuple[int, int]], chunk: int, other_work: Work = NOTHING
    ) -> float:
        """Return the predicted seconds of all `prompts`, each (tokens to compute, start).

        They share steps of `chunk` prompt tokens with the decodes, whose context is taken as
        constant. Only the last token of each is sampled. Closed form, because a step is linear in
        its context: 1,000 tokens in chunks of 300 are three steps of 300 and one of 100, which read
        0, 300, 600 and 900 tokens of their own before them.
        """
        parts, total, num_prompts, seconds = self._parts, 0, 0, 0.0
        for tokens, start in prompts:
            if tokens <= 0:
                continue
            total, num_prompts = total + tokens, num_prompts + 1
            reread = sum(
                [kv_tokens_before(start, chunk, tokens, window) for window in self.windows]
            )
            seconds += parts[ATTENDED] * (tokens * start + tokens * (tokens + 1) // 2)
            seconds += parts[READ] * (reread + tokens * len(self.windows))
        whole, rest = divmod(total, chunk)
        tokens, sampled, attended, read = other_work
        if whole:
            seconds += whole * self.seconds(Work(tokens + chunk, sampled, attended, read))
        if rest:
            seconds += self.seconds(Work(tokens + rest, sampled, attended, read))
        num_steps = whole + (rest > 0)
        if not sampled:
            seconds += parts[ANY_SAMPLED] * min(num_prompts, num_steps)
        return seconds + parts[SAMPLED] * num_prompts

    # ── learn ───────────────────────────────────────────────────────────────────────────────

    def observe(self, record: StepRecord) -> None:
        """Write the prediction into the record, then learn from it (`observed_s`)."""
        actual_s = observed_s(record)
        if not actual_s:
            return
        record.predicted_s = predicted_s = self.learn(work_done(record), actual_s)
        if self.num_observed > 1:
            self._errors.append(abs(predicted_s / actual_s - 1))

    def learn(self, work: Work, actual_s: float) -> float:
        """Learn one step and return its prediction; the very first step sets the scale.

        The filter's state is the logarithm of each part, its measurement the logarithm of the
        step's seconds, which rises with a part's logarithm by the part's share of the prediction.
        """
        predicted_s = self.seconds(work)
        self.num_observed += 1
        error = log(actual_s / predicted_s)
        if self.num_observed == 1:
            self._state.logs += error
            error = 0.0
        tokens, sampled, attended, read = work
        where = locate(tokens)
        self._parts = self._learn(*where, sampled, attended, read, predicted_s, error)
        return predicted_s

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> ModelSnapshot:
        """Return what was learned, in the form of the server and the calibration file."""
        return ModelSnapshot(self.num_observed, tuple(self._parts), self.windows)

    @classmethod
    def of(cls, snapshot: ModelSnapshot, prior: Prior | None = None) -> "StepModel":
        """Return a model that predicts as the snapshot's; ValueError for other parts."""
        if len(snapshot.parts) != NUM_PARTS:
            raise ValueError(f"the model has {len(snapshot.parts)} parts, not {NUM_PARTS}")
        model = cls(prior, snapshot.windows)
        model.set_parts(np.array(snapshot.parts))
        model.num_observed = snapshot.num_observed
        return model

    # ── figures ────────────────────────────────────────────────────────────────────────────────

    @property
    def attended_s(self) -> float:
        """Return the seconds of a row per token of its context."""
        return self._parts[ATTENDED]

    @property
    def errors(self) -> tuple[float, float] | None:
        """Return (median, 95th percentile) of |predicted / actual − 1| over the last steps.

        Each step was predicted before it was learned; None without steps.
        """
        if not self._errors:
            return None
        median, p95 = np.percentile(self._errors, (50, 95)).tolist()
        return median, p95

    @property
    def parts(self) -> dict[str, float]:
        """Return seconds by name: at each breakpoint of the curve, and per unit of the others."""
        names = [f"tokens_{tokens}" for tokens in BREAKPOINTS]
        names += ["any_sampled", "sampled", "attended", "read"]
        return dict(zip(names, self._parts, strict=True))

    def check_integrity(self) -> None:
        """Assert that predictions are finite, never negative, and rise with the tokens."""
        parts, curve = self._parts, self._parts[:NUM_BREAKPOINTS]
        assert all(part > 0 and np.isfinite(part) for part in parts), parts
        assert all(low <= high for low, high in pairwise(curve)), curve
        assert np.allclose(np.exp(self._state.logs), parts), "the logarithms are not the parts'"
        assert np.isfinite(self._state.covariance).all()
        assert (self._state.covariance.diagonal() > 0).all(), "a variance is not positive"


def prior_parts(prior: Prior) -> np.ndarray:
    """Return the parts of the prior: at each breakpoint the longer of weights and FLOPs."""
    tokens = np.array(BREAKPOINTS, float)
    curve = HOST_STEP_S + np.maximum(prior.weights_s, tokens * prior.token_s)
    rest = (prior.any_sampled_s, prior.sampled_s, prior.attended_s, prior.read_s)
    return np.concatenate([curve, np.maximum(rest, MIN_PART_S)])


@lru_cache
def uncertainty(speed: float, shape: float, units: float) -> np.ndarray:
    """Return the covariance of the logarithms of the parts.

    All are uncertain by `speed` together; in addition the points of the curve by `shape`, similarly
    to their neighbours, and the other parts by `units`, independently. A point's own part grows
    with its distance to the next lower one, in powers of two.
    """
    covariance = np.full((NUM_PARTS, NUM_PARTS), speed**2)
    points = np.log2(BREAKPOINTS)
    near = np.exp(-np.abs(points[:, None] - points) / CORRELATION_OCTAVES)
    covariance[:NUM_BREAKPOINTS, :NUM_BREAKPOINTS] += shape**2 * near
    diagonal = covariance.reshape(-1)[:: NUM_PARTS + 1]
    diagonal[:NUM_BREAKPOINTS] += shape**2 * np.diff(points, prepend=-1)
    diagonal[NUM_BREAKPOINTS:] += units**2
    return covariance


def kv_tokens_before(start: int, chunk: int, tokens: int, window: int) -> int:
    """Return the KV tokens that the chunks of `tokens` read before their own, within the window.

    >>> kv_tokens_before(0, 300, 1000, window=0), kv_tokens_before(0, 300, 1000, window=501)
    (1800, 1300)
    """
    steps = -(-tokens // chunk)
    free = min(steps, max(-(-(window - 1 - start) // chunk), 0)) if window else steps
    return free * start + chunk * free * (free - 1) // 2 + (steps - free) * (window - 1)
