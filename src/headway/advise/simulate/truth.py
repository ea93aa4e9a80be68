"""Step times of a simulated machine: the mean by what a step does, and the machine's pace over
time.

The engine's cost model predicts the median step, on purpose; a simulation needs the mean and the
tail as well. `CalibratedTruth` fits the mean to the steps of a calibration by least squares, and
then replays the measured pace: how many real seconds each second of predicted work took, in the
order in which the steps ran. So a slow minute stays slow, a stall is a piece of time that hits one
long step or one of many short ones, and the sum of all seconds is the measured one. Worked example:

    predicted  10  10  10  10 ms        by the fit
    observed   10  10  40  10 ms        a stall of 30 ms in the third
    a step of 20 ms that begins 5 ms before the stall takes 5 + 40 + 5 = 50 ms;
    four steps of 5 ms take 5, 20, 20 and 5 ms
"""

import random
from dataclasses import dataclass, field
from operator import gt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.records import ModelSnapshot
from headway.perf.filter import BREAKPOINTS, NUM_BREAKPOINTS, NUM_PARTS, SAMPLED
from headway.perf.model import Prior, StepModel, Work, prior_parts
from headway.telemetry.calibration import MachineCalibration, StepColumns

Floats = NDArray[np.float64]
CROWD_ROWS = (8, 16, 32, 64, 128)
"""Numbers of rows beyond which a row may cost more: keys and values no longer fit the caches, and a
full server has more work besides."""
NUM_COLD_STEPS = 2
"""Number of steps after one with a prompt that may take longer, since the prompt has used the
caches."""
NEVER_COLD = np.zeros(NUM_COLD_STEPS)
CALIBRATED, TRANSFERRED, ROOFLINE = "calibrated", "transferred", "roofline"
MAX_STEP_RATIO = 3.0
"""In the fit of the mean a step counts as at most this multiple of its prediction; the excess is in
the pace."""
PRIOR_WEIGHT_STEPS = 4.0
"""Weight of the cost model's prediction in the fit, in steps."""
SWEEPS = 200
REPLAY_BLOCK_S = 4.0
"""Seconds of predicted work that are replayed in a row."""
MAX_HALF_DRIFT = 0.2
"""A machine whose pace differs by more between two halves is not steady enough to calibrate."""
STEP_SAMPLE_POINTS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
"""Points of a step at which the other engines in a step are counted."""
MAX_INTERFERENCE, GOLDEN_SECTION_STEPS = 2.0, 12
"""The largest interference that is searched, and the number of golden-section steps."""
EMPTY_STEP_S = 2e-4
"""Seconds of a step that computes nothing: it is planned and recorded."""


class MeanStepTime:
    """The mean time of a step by its work: the engine's own cost model, and the additional cost of
    a row that is one of many, or beside a prompt.

    Worked example, 0.02 ms beyond 8 rows, 0.05 beyond 16 and 0.01 beyond 8 beside a prompt: 24 rows
    take 16 x 0.02 + 8 x 0.05 = 0.72 ms more than by the model, 0.88 beside a prompt.
    """

    def __init__(self, cost: StepModel, crowd_s: Floats, cold_s: Floats = NEVER_COLD) -> None:
        self.cost, self.cold_s = cost, cold_s.tolist()
        *alone_s, self._with_prompt_s = crowd_s.tolist()
        self._crowd = [(rows, s) for rows, s in zip(CROWD_ROWS, alone_s, strict=True) if s]

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        seconds, sampled = self.cost.seconds(work), work.num_sampled
        for rows, row_s in self._crowd:
            if sampled > rows:
                seconds += (sampled - rows) * row_s
        if work.num_tokens > sampled > CROWD_ROWS[0]:
            seconds += (sampled - CROWD_ROWS[0]) * self._with_prompt_s
        return seconds


class SequentialMean:
    """The mean of consecutive steps: the first ones after a prompt find their weights in no cache.

    Worked example, 0.4 and 0.1 ms: a prompt of 20 ms, then decodes of 1.4, 1.1, 1, 1 ms.
    """

    def __init__(self, mean: MeanStepTime) -> None:
        self._mean, self._since = mean, NUM_COLD_STEPS

    def seconds(self, work: Work) -> float:
        """Return the seconds of the next step."""
        seconds = self._mean.seconds(work)
        if work.num_tokens > work.num_sampled:
            self._since = 0
        elif self._since < NUM_COLD_STEPS:
            seconds += self._mean.cold_s[self._since]
            self._since += 1
        return seconds


class Truth(Protocol):
    """The seconds of each step, in the order in which steps run."""

    label: str
    reach: "MeasuredRange"

    def seconds(self, work: Work) -> float:
        """Return the seconds of the next step, which does `work`."""
        ...


@dataclass(slots=True)
class MeasuredRange:
    """Counts steps that are larger than any measured one."""

    most: tuple[int, ...]
    num_steps: int = 0
    num_beyond: int = 0

    def count(self, work: Work) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_beyond += any(map(gt, work, self.most))

    @property
    def share(self) -> float:
        """Return the share of steps beyond the measured range."""
        return self.num_beyond / self.num_steps if self.num_steps else 0.0


class CalibrationFit:
    """The fit of a calibration's steps, made once for many runs.

    `ratio` scales each part: another format of the same model. `belief` is the engine's own cost
    model: its snapshot (`model`), or learned from these steps where the file is older. `mean` is
    the mean time of a step by its work. `own_s` are the step times without other processes
    (`own_time.py`), by default the measured ones. `interference` is the share by which a step takes
    longer for each other engine in a step, 0 where one engine was measured; it is taken out of all
    the rest.
    """

    def __init__(
        self,
        steps: StepColumns,
        windows: tuple[int, ...],
        prior: Prior | None = None,
        ratio: Floats | None = None,
        own_s: Floats | None = None,
        model: ModelSnapshot | None = None,
    ) -> None:
        works = works_of(steps)
        self.observed_s = np.array(steps.seconds) if own_s is None else own_s
        self.belief = learned_model(works, steps.seconds, windows, prior)
        if model is not None:
            self.belief.set_parts(np.array(model.parts))
        cold, others = behind_prompts(works, steps.engine), others_in_steps(steps)
        self.interference, self.observed_s = remove_interference(
            works, cold, self.observed_s, others, self.belief
        )
        parts, more_s, self.predicted_s = fit_parts(works, cold, self.observed_s, self.belief)
        crowd_s, cold_s = more_s[:-NUM_COLD_STEPS], more_s[-NUM_COLD_STEPS:]
        mean = StepModel(prior, windows)
        mean.set_parts(parts if ratio is None else parts * ratio)
        self.mean = MeanStepTime(mean, crowd_s, cold_s)
        if ratio is not None:
            self.mean = MeanStepTime(mean, crowd_s * ratio[SAMPLED], cold_s * ratio[0])
            self.belief.set_parts(np.array(list(self.belief.parts.values())) * ratio)
        self.most = tuple(max(column) for column in zip(*works, strict=True))
        self.drift = drift(self.predicted_s, self.observed_s)
        """Variation of the pace from one part of the time to another, as a share."""
        half = len(works) // 2
        first, second = (
            self.observed_s[part].sum() / self.predicted_s[part].sum()
            for part in (slice(0, half), slice(half, None))
        )
        self.half_drift = float(abs(second / first - 1))
        """Difference in pace between the first and the second half."""


class CalibratedTruth:
    """The truth of a calibration; `scale` stretches all of it, for a slower machine."""

    def __init__(
        self, fit: CalibrationFit, *, seed: int = 0, scale: float = 1.0, label: str = CALIBRATED
    ) -> None:
        self.label, self._scale = label, scale
        self._mean = SequentialMean(fit.mean)
        self._pace = PaceReplay(fit.predicted_s, fit.observed_s, seed)
        self.reach = MeasuredRange(fit.most)

    def seconds(self, work: Work) -> float:
        self.reach.count(work)
        if not work.num_tokens:
            return EMPTY_STEP_S * self._scale
        return self._scale * self._pace.take(self._mean.seconds(work))


class PaceReplay:
    """Real seconds of predicted seconds, replayed in blocks from places that the seed draws."""

    def __init__(self, expected: Floats, took: Floats, seed: int) -> None:
        self._expected = [0.0, *np.cumsum(expected).tolist()]
        self._took = [0.0, *np.cumsum(took).tolist()]
        self._random = random.Random(seed)
        self._jump()

    def _jump(self) -> None:
        """Continue from another place."""
        last = len(self._expected) - 2
        self._index = self._random.randint(0, last)
        self._at = self._expected[self._index]
        self._block_remaining_s = REPLAY_BLOCK_S

    def take(self, expected_s: float) -> float:
        """Return the real seconds of the next `expected_s`."""
        self._block_remaining_s -= expected_s
        seconds, end = 0.0, self._expected[-1]
        while expected_s >= end - self._at:  # all there is: go on from the beginning
            expected_s -= end - self._at
            seconds += self._until(end)
            self._at, self._index = 0.0, 0
        seconds += self._until(self._at + expected_s)
        if self._block_remaining_s <= 0:
            self._jump()
        return seconds

    def _until(self, until: float) -> float:
        """Return the real seconds until `until` seconds of predicted work, and move there."""
        expected, index = self._expected, self._index
        began = self._real(self._at, index)
        last = len(expected) - 2
        while index < last and expected[index + 1] < until:
            index += 1
        self._at, self._index = until, index
        return self._real(until, index) - began

    def _real(self, at: float, index: int) -> float:
        """Return the real time at a place, linear between the ends of its step."""
        low, high = self._expected[index], self._expected[index + 1]
        begin, end = self._took[index], self._took[index + 1]
        real_s: float = begin + (end - begin) * (at - low) / (high - low)
        return real_s


def drift(expected: Floats, took: Floats) -> float:
    """Return the standard deviation of the pace of ten parts of the time, as a share of its
    mean."""
    parts = [part for part in np.array_split(np.arange(len(took)), 10) if len(part)]
    paces = [float(took[part].sum() / expected[part].sum()) for part in parts]
    return float(np.std(paces) / np.mean(paces)) if len(paces) > 1 else 0.0


# ── the mean ────────────────────────────────────────────────────────────────────────────────


def works_of(steps: StepColumns) -> list[Work]:
    """Return the work of each step."""
    columns = zip(steps.tokens, steps.sampled, steps.attended, steps.read, strict=True)
    return [Work(*row) for row in columns]


def learned_model(
    works: list[Work], seconds: list[float], windows: tuple[int, ...], prior: Prior | None
) -> StepModel:
    """Return the engine's own cost model after these steps."""
    belief = StepModel(prior, windows)
    for work, took in zip(works, seconds, strict=True):
        belief.learn(work, took)
    return belief


def behind_prompts(works: list[Work], engine: list[int]) -> Floats:
    """Return [steps, NUM_COLD_STEPS]: 1 where a step is the first, second, … after one with a
    prompt.

    Steps are counted by engine; `engine` is [] where one ran all.
    """
    positions = np.zeros((len(works), NUM_COLD_STEPS))
    since: dict[int, int] = {}
    for number, (work, number_of_engine) in enumerate(
        zip(works, engine or [0] * len(works), strict=True)
    ):
        if work.num_tokens > work.num_sampled:
            since[number_of_engine] = 0
        elif (steps := since.get(number_of_engine, NUM_COLD_STEPS)) < NUM_COLD_STEPS:
            positions[number, steps] = 1
            since[number_of_engine] = steps + 1
    return positions


def others_in_steps(steps: StepColumns) -> Floats:
    """Return [steps, STEP_SAMPLE_POINTS]: the number of other engines in a step at each point of a
    step.

    All are zeros where the file does not name the engine of a step, as of one engine.
    """
    engine, seconds = np.array(steps.engine), np.array(steps.seconds)
    begin = np.array(steps.started_s)
    moments = begin[:, None] + seconds[:, None] * STEP_SAMPLE_POINTS
    others = np.zeros(moments.shape)
    for number in np.unique(engine):
        own = engine == number
        ends = np.minimum(begin[own] + seconds[own], np.append(begin[own][1:], np.inf))
        index = np.searchsorted(begin[own], moments)
        others += (index > 0) & (moments < ends[index - 1]) & ~own[:, None]
    return others


def remove_interference(
    works: list[Work], cold: Floats, seconds: Floats, others: Floats, belief: StepModel
) -> tuple[float, Floats]:
    """Return (interference of each other engine in a step, seconds of each step without it).

    The share is the one by which steps of the same work are most alike. Worked example: 8 ms alone,
    10 beside another engine, 9.1 of which 5.1 were beside one: with a quarter all are 8 ms, for 5.1
    ms at four fifths of the speed are 4.1.
    """
    if not others.any():
        return 0.0, seconds

    def alone(share: float) -> Floats:
        own_seconds: Floats = seconds * (1 / (1 + share * others)).mean(axis=1)
        return own_seconds

    def spread(share: float) -> float:
        own = alone(share)
        expected = fit_parts(works, cold, own, belief)[2]
        return float(((np.minimum(own / expected, MAX_STEP_RATIO) - 1) ** 2).mean())

    low, high = 0.0, MAX_INTERFERENCE
    for _ in range(GOLDEN_SECTION_STEPS):
        step = (high - low) * (5**0.5 - 1) / 2
        if spread(high - step) < spread(low + step):
            high = low + step
        else:
            low = high - step
    share = (low + high) / 2
    return share, alone(share)


def fit_parts(
    works: list[Work], cold: Floats, seconds: Floats, belief: StepModel
) -> tuple[Floats, Floats, Floats]:
    """Return (seconds of each part; additional costs; predicted seconds of each step).

    Additional costs are those of a row beyond each of `CROWD_ROWS`, of one beyond the first beside
    a prompt, and of each step after one. The fit is least squares on relative errors. No part is
    negative, and the curve never falls, since its unknowns are the rises from breakpoint to
    breakpoint. Parts that the steps do not show keep the cost model's value, which has no crowds
    and no cold caches.
    """
    believed = np.array([belief.seconds(work) for work in works])
    ratio = float(np.minimum(seconds / believed, MAX_STEP_RATIO).mean())
    believed *= ratio
    parts = np.array(list(belief.parts.values())) * ratio
    none = np.zeros(len(CROWD_ROWS) + 1 + NUM_COLD_STEPS)
    table = np.concatenate([design_matrix(works), cold], axis=1)
    rises = np.concatenate(
        [parts[:1], np.diff(parts[:NUM_BREAKPOINTS]), parts[NUM_BREAKPOINTS:], none]
    )
    scale = np.maximum(rises, 1e-3 * believed.mean() / np.maximum(table.mean(0), 1e-9))
    scale[NUM_PARTS:-NUM_COLD_STEPS] = believed.sum() / sum(work.num_tokens for work in works)
    scale[-NUM_COLD_STEPS:] = believed.mean()
    rows = table * scale / believed[:, None]
    target = np.minimum(seconds / believed, MAX_STEP_RATIO)
    gram = rows.T @ rows + PRIOR_WEIGHT_STEPS * np.eye(len(rises))
    moments = rows.T @ target + PRIOR_WEIGHT_STEPS * rises / scale
    solved = solve_non_negative(gram, moments, rises / scale) * scale
    curve = np.cumsum(solved[:NUM_BREAKPOINTS])
    parts_s = np.concatenate([curve, solved[NUM_BREAKPOINTS:NUM_PARTS]])
    return parts_s, solved[NUM_PARTS:], table @ solved


def design_matrix(works: list[Work]) -> Floats:
    """Return a row for each step: the weight of each rise of the curve and of each unit of the
    rest.

    36 tokens have the rises to all breakpoints up to 32 in full and half of that to 40.
    """
    tokens = np.array([work.num_tokens for work in works], dtype=float)[:, None]
    knots = np.array(BREAKPOINTS, dtype=float)
    reached = np.maximum((tokens - knots[:-1]) / np.diff(knots), 0.0)
    reached[:, :-1] = np.minimum(reached[:, :-1], 1.0)  # beyond the last knot it goes on straight
    rest = np.array([work[1:] for work in works], dtype=float)
    some = (rest[:, :1] > 0).astype(float)
    crowd = np.maximum(rest[:, :1] - np.array(CROWD_ROWS, dtype=float), 0.0)
    with_prompt = crowd[:, :1] * (tokens > rest[:, :1])
    return np.concatenate(
        [np.ones((len(works), 1)), reached, some, rest, crowd, with_prompt], axis=1
    )


def solve_non_negative(gram: Floats, moments: Floats, start: Floats) -> Floats:
    """Return the x ≥ 0 with the least xᵀ gram x − 2 moments x, by coordinate descent."""
    x = np.maximum(start, 0.0)
    for _ in range(SWEEPS):
        for k in range(len(x)):
            x[k] = max(0.0, x[k] + (moments[k] - gram[k] @ x) / gram[k, k])
    return x


def ratio_of(new: Prior, old: Prior) -> Floats:
    """Return the cost of each part of another model or format over that of the measured one."""
    ratio: Floats = prior_parts(new) / prior_parts(old)
    return ratio


def check_same(calibration: MachineCalibration, fingerprint: str, settings: dict[str, str]) -> None:
    """Raise UsageError where the calibration is of another model, or of settings with other
    costs."""
    if calibration.fingerprint != fingerprint:
        raise UsageError(
            f"The calibration is of another model: {calibration.model}.",
            "Calibrate this one (headway bench URL --calibrate FILE), or give --transfer.",
        )
    differ = [n for n in COST_SETTINGS if calibration.settings.get(n) != settings.get(n)]
    if differ:
        name = differ[0]
        raise UsageError(
            f"The calibration is of {name} {calibration.settings.get(name)}; here it is "
            f"{settings.get(name)}.",
            "Calibrate with that setting, or give --transfer.",
        )


def check_measured_alone(calibration: MachineCalibration, settings: dict[str, str]) -> None:
    """Raise UsageError where a setting differs whose effect on a step no roofline predicts.

    An old calibration does not name these settings: its server had none of them.
    """
    for name, usual in MEASURED_ALONE.items():
        had, has = calibration.settings.get(name, usual), settings.get(name, usual)
        if had != has:
            raise UsageError(
                f"The calibration is of --{name.replace('_', '-')} {had}; here it is {has}.",
                "The time of such steps can only be measured: calibrate a server that has it "
                "(headway bench URL --calibrate FILE).",
            )


COST_SETTINGS = (
    "device",
    "dtype",
    "kv_dtype",
    "quantization",
    "kernels",
    "attention_backend",
    "threads",
)
"""Settings that change the cost of a step."""
MEASURED_ALONE = {
    "tensor_parallel_size": "1",
    "pipeline_parallel_size": "1",
    "decode_context_parallel_size": "1",
    "kv_read": "1.0",
    "kv_keep": "1",
}
"""Settings whose effect on a step no roofline predicts, with their values in a server without
them."""


@dataclass(slots=True)
class RooflineTruth:
    """A machine without measurements: bytes and FLOPs over the reached shares of its datasheet.

    It gives no single time to print: the shares are estimates, so results are intervals of two.
    """

    weights_s: float
    read_s: float
    token_s: float
    attended_s: float
    sampled_s: float
    head_s: float
    fixed_s: float
    token_link_s: float = 0.0
    label: str = ROOFLINE
    reach: MeasuredRange = field(default_factory=lambda: MeasuredRange((2**62,) * 4))

    def seconds(self, work: Work) -> float:
        self.reach.count(work)
        tokens, sampled, attended, read = work
        if not tokens:
            return self.fixed_s
        reading_s = self.weights_s + self.read_s * read + (self.head_s if sampled else 0.0)
        computing_s = self.token_s * tokens + self.attended_s * attended + self.sampled_s * sampled
        return max(reading_s, computing_s) + self.fixed_s + self.token_link_s * tokens
