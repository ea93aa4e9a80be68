"""What a step costs: predicted seconds, learned from the steps that ran.

Given a prior (roughly how long weights, tokens and KV take on this machine) and the record of every
step, it promises seconds that are never negative and never fall when a step gets more to do. The
scheduler asks it how large a chunk fits, admission how long a prompt will take. Worked example,
4 ms to read the weights, 0.1 ms a token beyond 40, 1 µs a KV token read:

    32 decodes of 1,000 tokens each    4 ms + 32 ms of KV           = 36 ms
    the same beside a chunk of 128     16 ms + 32 ms + its own KV   = 48 ms

The time is a curve over the number of tokens (straight between knots at 1, 2, 4, … 16,384) plus
so much for each sampled row, attended token and KV token read. All are learned at once by a Kalman
filter on the relative error (Kalman 1960): the machine's speed, common to all, drifts fast, the
shape slowly; a part that no step has shown is the prior's, scaled by what was seen.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from headway.core.model_spec import ModelSpec
from headway.core.plan import Description
from headway.telemetry.records import StepRecord
from headway.telemetry.utilization import Work as ModelWork

NUM_KNOTS = 15
"""The curve's knots are at 2⁰ … 2¹⁴ tokens; beyond them it goes on straight."""
ANY_SAMPLED, SAMPLED, ATTENDED, READ = range(NUM_KNOTS, NUM_KNOTS + 4)
NUM_PARTS = NUM_KNOTS + 4
KEPT_ERRORS = 512

UNKNOWN = {"cpu": (20e9, 200e9), "cuda": (1e12, 200e12)}
"""Bytes/s and FLOP/s of a machine nobody has measured; the first steps correct both."""
HOST_S, HOST_ROW_S = 3e-4, 1e-5

NOISE = 0.08
"""Relative spread of the same step run twice."""
SPEED_UNSURE, SHAPE_UNSURE = 1.0, 0.3
"""Relative uncertainty of the prior: of all parts together, and of each beside its neighbours."""
NEIGHBOURS = 2.0
"""Knots this far apart share 1/e of what is not known of them."""
SPEED_DRIFT, SHAPE_DRIFT = 0.02, 0.004
"""Relative random walk per step."""
DRIFT_EVERY = 8
"""Steps after which the drift of all of them is added."""
LEAST_GAIN = 0.1
"""A part that is 0 now may have this share of the prior's again."""
CLIP = 2.0
"""Errors beyond so many standard deviations count as that many: a hiccup of the machine."""
CHANGED_AFTER, CHANGED_BY = 3, 0.5
"""So many clipped errors in a row of one sign are a change of speed, not hiccups."""


class Work(NamedTuple):
    """What a step does, counted as `telemetry.records.count_work` does; KV summed over groups."""

    num_tokens: int
    num_sampled: int
    attended_tokens: int
    kv_tokens_read: int


NOTHING = Work(0, 0, 0, 0)


class Prior(NamedTuple):
    """Seconds before any step was seen: to read the weights, and per unit of each kind of work."""

    weights_s: float = 0.01
    token_s: float = 1e-3
    any_sampled_s: float = 1e-4
    sampled_s: float = 1e-5
    attended_s: float = 1e-7
    read_s: float = 1e-6


def prior_of(spec: ModelSpec, machine: Description, dtype: str, kv_dtype: str = "") -> Prior:
    """What the machine's ceilings allow at best; one that was not measured is a common one's."""
    ceilings = machine.ceilings
    bandwidth, flops_per_s = UNKNOWN.get(machine.device.partition(":")[0], UNKNOWN["cpu"])
    bandwidth = ceilings.bandwidth_bytes_per_s or bandwidth
    flops_per_s = ceilings.flops_per_s or flops_per_s
    work = ModelWork(spec, dtype, kv_dtype, machine.bytes_per_weight)
    head = spec.embedding_parameters / spec.num_parameters
    return Prior(
        weights_s=(1 - head) * work.weight_bytes / bandwidth,
        token_s=spec.flops(1, 0, 0) / flops_per_s,
        any_sampled_s=head * work.weight_bytes / bandwidth,
        sampled_s=2 * spec.embedding_parameters / flops_per_s + HOST_ROW_S,
        attended_s=4 * spec.num_layers * spec.q_size / flops_per_s,
        read_s=sum(work.kv_bytes) / len(work.kv_bytes) / bandwidth,
    )


class StepCost:
    """Predicts the seconds of a step from its work; `observe` each step to keep it true.

    `windows` by KV group, 0 for full attention: what a chunk reads of each.
    """

    def __init__(self, prior: Prior | None = None, windows: tuple[int, ...] = (0,)) -> None:
        self.prior, self.windows = prior or Prior(), windows
        self._errors: deque[float] = deque(maxlen=KEPT_ERRORS)
        self.forget()

    def forget(self) -> None:
        """Know nothing but the prior again."""
        self.num_observed = 0
        self._base = base_of(self.prior)
        self._gains = np.ones(NUM_PARTS)
        self._covariance = prior_covariance()
        self._num_clipped = 0
        self._errors.clear()
        self._parts: list[float] = self._base.tolist()

    # ── predict ─────────────────────────────────────────────────────────────────────────────

    def seconds(self, work: Work) -> float:
        """Predicted seconds of a step that does `work`, the gap before it included."""
        tokens, sampled, attended, read = work
        parts = self._parts
        seconds = self._curve(tokens) + parts[ATTENDED] * attended + parts[READ] * read
        if sampled:
            seconds += parts[ANY_SAMPLED] + parts[SAMPLED] * sampled
        return seconds

    def _curve(self, tokens: int) -> float:
        """The part of the tokens alone, straight between knots: 48 is half-way from 32 to 64."""
        parts = self._parts
        if tokens <= 1:
            return parts[0]
        above = min((tokens - 1).bit_length(), NUM_KNOTS - 1)
        below_s, low = parts[above - 1], 1 << above - 1
        return below_s + (parts[above] - below_s) * (tokens - low) / low

    def beside(self, work: Work, start: int, count: int) -> Work:
        """`work` and a chunk of `count` tokens from position `start` that samples its last."""
        if count <= 0:
            return work
        reach = sum([min(start, window - 1) if window else start for window in self.windows])
        return Work(
            work.num_tokens + count,
            work.num_sampled + 1,
            work.attended_tokens + count * start + count * (count + 1) // 2,
            work.kv_tokens_read + reach + count * len(self.windows),
        )

    def chunk(self, room_s: float, beside: Work, start: int, most: int) -> int:
        """The most tokens from position `start` that fit beside that work into `room_s`; 0: none.

        Of the chunk's own seconds c tokens cost curve(tokens + c) + c · slope + c² · square.

        >>> StepCost().chunk(0.1, NOTHING, start=0, most=512) > 0
        True
        """
        first_s = self.seconds(self.beside(beside, start, 1))
        if most <= 0 or first_s > room_s:
            return 0
        tokens, square = beside.num_tokens, self._parts[ATTENDED] / 2
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

    def prefill_s(self, num_tokens: int, start: int, chunk: int, beside: Work = NOTHING) -> float:
        """Predicted seconds to compute `num_tokens` from `start` in chunks beside those decodes."""
        return self.backlog_s([(num_tokens, start)], chunk, beside)

    def backlog_s(
        self, prompts: Iterable[tuple[int, int]], chunk: int, beside: Work = NOTHING
    ) -> float:
        """Predicted seconds until all of `prompts`, (tokens to compute, start), are computed.

        They share steps of `chunk` prompt tokens beside those decodes, whose context stands still.
        Only the last token of each is sampled. Closed form, for a step is linear in its context:
        1,000 tokens in chunks of 300 are three steps of 300 and one of 100, which read 0, 300,
        600 and 900 tokens of their own before them.
        """
        parts, total, num_prompts, seconds = self._parts, 0, 0, 0.0
        for tokens, start in prompts:
            total, num_prompts = total + tokens, num_prompts + 1
            reread = sum([before(start, chunk, tokens, window) for window in self.windows])
            seconds += parts[ATTENDED] * (tokens * start + tokens * (tokens + 1) // 2)
            seconds += parts[READ] * (reread + tokens * len(self.windows))
        whole, rest = divmod(total, chunk)
        tokens, sampled, attended, read = beside
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
        """Write what had been predicted into the record, then learn from it.

        A step that waited for grammar masks or computed nothing says nothing of the model.
        """
        actual_s = record.duration_s + record.gap_s
        if not record.num_tokens or record.mask_wait_s or actual_s <= 0:
            return
        work = Work(
            record.num_tokens,
            record.num_sampled,
            record.attended_tokens,
            sum(record.kv_tokens_read),
        )
        record.predicted_s = predicted_s = self.seconds(work)
        if self.num_observed:
            self._errors.append(abs(predicted_s / actual_s - 1))
        self.learn(work, actual_s)

    def learn(self, work: Work, actual_s: float) -> None:
        """One step of the filter; the first step of all sets the scale."""
        predicted_s = self.seconds(work)
        if not self.num_observed:
            self._base *= actual_s / predicted_s
            predicted_s = actual_s
        self.num_observed += 1
        row = self._row(work) / predicted_s
        spread = self._covariance @ row
        variance = float(row @ spread) + NOISE**2
        error = self._clip(actual_s / predicted_s - 1, CLIP * sqrt(variance))
        self._gains += spread * (error / variance)
        self._covariance -= np.multiply.outer(spread, spread / variance)
        if self.num_observed % DRIFT_EVERY == 0:
            self._drift()
        self._project()

    def _row(self, work: Work) -> np.ndarray:
        """Seconds that each part gives to this work at a gain of 1."""
        tokens, sampled, attended, read = work
        row = np.zeros(NUM_PARTS)
        above = min(max(tokens - 1, 0).bit_length(), NUM_KNOTS - 1)
        if above:
            low = 1 << above - 1
            share = (tokens - low) / low
            row[above - 1], row[above] = 1 - share, share
        else:
            row[0] = 1.0
        row[ANY_SAMPLED:] = 1 if sampled else 0, sampled, attended, read
        row *= self._base
        return row

    def _clip(self, error: float, limit: float) -> float:
        """The error within ±`limit`; several beyond it in a row open the filter for a new speed."""
        if abs(error) <= limit:
            self._num_clipped = 0
            return error
        sign = 1 if error > 0 else -1
        self._num_clipped = self._num_clipped + sign if self._num_clipped * sign > 0 else sign
        if abs(self._num_clipped) >= CHANGED_AFTER:
            self._num_clipped = 0
            self._covariance += CHANGED_BY**2 * np.multiply.outer(self._gains, self._gains)
        return limit * sign

    def _drift(self) -> None:
        """What may have changed in some steps; what is not seen is never less sure than at first.

        The speed moves all gains g together and adds q² · g · gᵀ, the shape adds a diagonal.
        """
        gains, covariance = self._gains, self._covariance
        floored = np.maximum(gains, LEAST_GAIN)
        covariance += DRIFT_EVERY * SPEED_DRIFT**2 * np.multiply.outer(gains, gains)
        diagonal = covariance.reshape(-1)[:: NUM_PARTS + 1]
        diagonal += DRIFT_EVERY * SHAPE_DRIFT**2 * floored**2
        most = (SPEED_UNSURE + SHAPE_UNSURE) * floored
        shrink = np.minimum(1.0, most / np.sqrt(diagonal))
        covariance *= np.multiply.outer(shrink, shrink)

    def _project(self) -> None:
        """Keep every part at 0 or above and the curve from falling."""
        parts = (self._base * self._gains).tolist()
        curve = parts[:NUM_KNOTS]
        if min(parts) < 0 or curve != sorted(curve):
            trust = (self._base**2 / self._covariance.diagonal()).tolist()
            parts = [max(part, 0.0) for part in parts]
            parts[:NUM_KNOTS] = rising(parts[:NUM_KNOTS], trust[:NUM_KNOTS])
            self._gains = np.array(parts) / self._base
        self._parts = parts

    # ── tell ────────────────────────────────────────────────────────────────────────────────

    @property
    def errors(self) -> tuple[float, float] | None:
        """(median, 95th percentile) of |predicted / actual − 1| over the last steps.

        Each was predicted before it was learned; None before there are any.
        """
        if not self._errors:
            return None
        median, p95 = np.percentile(self._errors, (50, 95)).tolist()
        return median, p95

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name: at each knot of the curve, and per unit of the rest."""
        names = [f"tokens_{1 << knot}" for knot in range(NUM_KNOTS)]
        names += ["any_sampled", "sampled", "attended", "read"]
        return dict(zip(names, self._parts, strict=True))

    def check_integrity(self) -> None:
        """Assert that predictions are finite, never negative, and rise with the tokens."""
        parts, curve = self._parts, self._parts[:NUM_KNOTS]
        assert all(part >= 0 and np.isfinite(part) for part in parts), parts
        assert all(low <= high for low, high in pairwise(curve)), curve
        assert np.allclose(self._base * self._gains, parts), "the gains are not the parts"
        assert np.isfinite(self._covariance).all()
        assert (self._covariance.diagonal() > 0).all(), "a variance is not positive"


def base_of(prior: Prior) -> np.ndarray:
    """The parts of the prior: at each knot whichever takes longer, weights or products."""
    tokens = 2.0 ** np.arange(NUM_KNOTS)
    curve = HOST_S + np.maximum(prior.weights_s, tokens * prior.token_s)
    rest = (prior.any_sampled_s, prior.sampled_s, prior.attended_s, prior.read_s)
    return np.concatenate([curve, np.maximum(rest, 1e-12)])


def prior_covariance() -> np.ndarray:
    """How wrong the gains may be: all together in the speed, neighbouring knots in the shape."""
    covariance = np.full((NUM_PARTS, NUM_PARTS), SPEED_UNSURE**2)
    knots = np.arange(NUM_KNOTS)
    near = np.exp(-np.abs(knots[:, None] - knots) / NEIGHBOURS)
    covariance[:NUM_KNOTS, :NUM_KNOTS] += SHAPE_UNSURE**2 * near
    covariance.flat[:: NUM_PARTS + 1] += SHAPE_UNSURE**2
    return covariance


def before(start: int, chunk: int, tokens: int, window: int) -> int:
    """KV tokens read before their own by the chunks of `tokens`, summed; a window sees no further.

    >>> before(0, 300, 1000, window=0), before(0, 300, 1000, window=501)
    (1800, 1300)
    """
    steps = -(-tokens // chunk)
    free = min(steps, max(-(-(window - 1 - start) // chunk), 0)) if window else steps
    return free * start + chunk * free * (free - 1) // 2 + (steps - free) * (window - 1)


def rising(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that fall share their weighted mean.

    >>> rising([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, more, count = pools.pop()
            both = more + pool[1]
            pool = ((mean * more + pool[0] * pool[1]) / both, both, count + pool[2])
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]
