"""How long a step really takes: the mean by what it does, and the machine's own good and bad times.

The engine's cost model believes in the median step, on purpose; who simulates needs the mean and
the tail as well. `Learned` fits the mean to the steps of a calibration by least squares, and then
replays their pace: how many real seconds each second of expected work took, in the order in which
it was seen. So a slow minute stays slow, a stall is a piece of time that hits one long step or one
of many short ones, and all seconds together are those that were measured. Worked example:

    expected  10  10  10  10 ms        by the fit
    took      10  10  40  10 ms        a stall of 30 ms in the third
    a step of 20 ms that begins 5 ms before it: 5 + 40 + 5 = 50 ms; four steps of 5 ms: 5, 20, 20, 5
"""

import random
from dataclasses import dataclass, field
from operator import gt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.advise.simulate.mean import COLD, CROWDS, InTurn, Mean
from headway.core.errors import UsageError
from headway.core.records import ModelSnapshot
from headway.perf.filter import BREAKPOINTS, NUM_BREAKPOINTS, NUM_PARTS, SAMPLED
from headway.perf.model import Prior, StepModel, Work, prior_parts
from headway.telemetry.calibration import MachineCalibration, StepColumns

Floats = NDArray[np.float64]
CALIBRATED, TRANSFERRED, ROOFLINE, RECORDED = "calibrated", "transferred", "roofline", "recorded"
HICCUP = 3.0
"""For the mean by kind of work a step counts as at most so many times its expectation; what it took
beyond that is in the pace."""
TRUST = 4.0
"""The belief counts in the fit as much as so many steps."""
SWEEPS = 200
BLOCK_S = 4.0
"""Seconds of expected work that are replayed in a row."""
STEADY = 0.2
"""A machine whose pace differs by more between two halves is not steady enough to calibrate."""
MOMENTS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
"""Of a step: who is in one beside it is counted at each."""
MOST_BESIDE, SEARCHED = 2.0, 12
"""The largest share that is looked for, and how often the interval is cut by the golden section."""
EMPTY_STEP_S = 2e-4
"""A step that computes nothing: it is planned and told."""


class Truth(Protocol):
    """The seconds of each step, in the order in which steps run."""

    label: str
    reach: "Reach"

    def seconds(self, work: Work) -> float:
        """How long the step takes that does `work`."""
        ...


@dataclass(slots=True)
class Reach:
    """How much of what steps do lies beyond what was ever measured."""

    most: tuple[int, ...]
    num_steps: int = 0
    num_beyond: int = 0

    def count(self, work: Work) -> None:
        """One step."""
        self.num_steps += 1
        self.num_beyond += any(map(gt, work, self.most))

    @property
    def share(self) -> float:
        """Of the steps that lay beyond."""
        return self.num_beyond / self.num_steps if self.num_steps else 0.0


class Fit:
    """What the steps of a calibration tell, read once for many runs.

    `ratio` scales each part: another format of the same model. `belief` is the engine's own cost
    model: what it had learned (`model`), or learns from these steps where the file is older, `mean`
    what a step takes by what it does. `own_s` is what they took with nobody else on their cores
    (`stripped.py`), by default what they took. `beside` is the share by which a step takes longer
    for each other engine that is in one, 0 where one engine was measured; it is taken out of all
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
        self.took = np.array(steps.seconds) if own_s is None else own_s
        self.belief = taught(works, steps.seconds, windows, prior)
        if model is not None:
            self.belief.set_parts(np.array(model.parts))
        cold, others = behind_prompts(works, steps.engine), others_in_steps(steps)
        self.beside, self.took = apart(works, cold, self.took, others, self.belief)
        parts, more_s, self.expected = fitted(works, cold, self.took, self.belief)
        crowd_s, cold_s = more_s[:-COLD], more_s[-COLD:]
        mean = StepModel(prior, windows)
        mean.set_parts(parts if ratio is None else parts * ratio)
        self.mean = Mean(mean, crowd_s, cold_s)
        if ratio is not None:
            self.mean = Mean(mean, crowd_s * ratio[SAMPLED], cold_s * ratio[0])
            self.belief.set_parts(np.array(list(self.belief.parts.values())) * ratio)
        self.most = tuple(max(column) for column in zip(*works, strict=True))
        self.drift = drift(self.expected, self.took)
        """By how much the pace varied from one part of the time to another, as a share."""
        half = len(works) // 2
        first, second = (
            self.took[part].sum() / self.expected[part].sum()
            for part in (slice(0, half), slice(half, None))
        )
        self.moved = float(abs(second / first - 1))
        """By how much the second half was slower or faster than the first."""


class Learned:
    """The truth of a calibration; `scale` stretches all of it, for a machine slower by so much."""

    def __init__(
        self, fit: Fit, *, seed: int = 0, scale: float = 1.0, label: str = CALIBRATED
    ) -> None:
        self.label, self._scale = label, scale
        self._mean = InTurn(fit.mean)
        self._pace = Pace(fit.expected, fit.took, seed)
        self.reach = Reach(fit.most)

    def seconds(self, work: Work) -> float:
        self.reach.count(work)
        if not work.num_tokens:
            return EMPTY_STEP_S * self._scale
        return self._scale * self._pace.take(self._mean.seconds(work))


class Pace:
    """Real seconds by expected seconds, replayed in blocks from places that the seed draws."""

    def __init__(self, expected: Floats, took: Floats, seed: int) -> None:
        self._expected = [0.0, *np.cumsum(expected).tolist()]
        self._took = [0.0, *np.cumsum(took).tolist()]
        self._random = random.Random(seed)
        self._jump()

    def _jump(self) -> None:
        """Go on from another place."""
        last = len(self._expected) - 2
        self._index = self._random.randint(0, last)
        self._at = self._expected[self._index]
        self._left = BLOCK_S

    def take(self, expected_s: float) -> float:
        """The real seconds of the next `expected_s`."""
        self._left -= expected_s
        seconds, end = 0.0, self._expected[-1]
        while expected_s >= end - self._at:  # all there is: go on from the beginning
            expected_s -= end - self._at
            seconds += self._until(end)
            self._at, self._index = 0.0, 0
        seconds += self._until(self._at + expected_s)
        if self._left <= 0:
            self._jump()
        return seconds

    def _until(self, until: float) -> float:
        """Real seconds from here until `until` seconds of expected work, where it then is."""
        expected, index = self._expected, self._index
        began = self._real(self._at, index)
        last = len(expected) - 2
        while index < last and expected[index + 1] < until:
            index += 1
        self._at, self._index = until, index
        return self._real(until, index) - began

    def _real(self, at: float, index: int) -> float:
        """Straight between the ends of the step that it falls into."""
        low, high = self._expected[index], self._expected[index + 1]
        begin, end = self._took[index], self._took[index + 1]
        real_s: float = begin + (end - begin) * (at - low) / (high - low)
        return real_s


def drift(expected: Floats, took: Floats) -> float:
    """The standard deviation of the pace of ten parts of the time, as a share of its mean."""
    parts = [part for part in np.array_split(np.arange(len(took)), 10) if len(part)]
    paces = [float(took[part].sum() / expected[part].sum()) for part in parts]
    return float(np.std(paces) / np.mean(paces)) if len(paces) > 1 else 0.0


# ── the mean ────────────────────────────────────────────────────────────────────────────────


def works_of(steps: StepColumns) -> list[Work]:
    """What each step did."""
    columns = zip(steps.tokens, steps.sampled, steps.attended, steps.read, strict=True)
    return [Work(*row) for row in columns]


def taught(
    works: list[Work], seconds: list[float], windows: tuple[int, ...], prior: Prior | None
) -> StepModel:
    """What the engine's own cost model believes after these steps."""
    belief = StepModel(prior, windows)
    for work, took in zip(works, seconds, strict=True):
        belief.learn(work, took)
    return belief


def behind_prompts(works: list[Work], engine: list[int]) -> Floats:
    """Who of the first `COLD` steps behind one with a prompt each step is, of its engine: a row
    each of zeros and at most a one. `engine` is [] where one ran all."""
    found = np.zeros((len(works), COLD))
    since: dict[int, int] = {}
    for number, (work, who) in enumerate(zip(works, engine or [0] * len(works), strict=True)):
        if work.num_tokens > work.num_sampled:
            since[who] = 0
        elif (steps := since.get(who, COLD)) < COLD:
            found[number, steps] = 1
            since[who] = steps + 1
    return found


def others_in_steps(steps: StepColumns) -> Floats:
    """How many other engines were in a step at each of the `MOMENTS` of every step, a row each;
    zeros where the file does not tell who ran which, as of one engine."""
    engine, took = np.array(steps.engine), np.array(steps.seconds)
    begin = np.array(steps.started_s)
    moments = begin[:, None] + took[:, None] * MOMENTS
    found = np.zeros(moments.shape)
    for number in np.unique(engine):
        own = engine == number
        ends = np.minimum(begin[own] + took[own], np.append(begin[own][1:], np.inf))
        index = np.searchsorted(begin[own], moments)
        found += (index > 0) & (moments < ends[index - 1]) & ~own[:, None]
    return found


def apart(
    works: list[Work], cold: Floats, seconds: Floats, others: Floats, belief: StepModel
) -> tuple[float, Floats]:
    """(By what share a step takes longer for each of the `others` in one; seconds of each step with
    nobody beside it): the share by which these are most alike for the same work.

    Worked example: 8 ms alone, 10 beside another, 9.1 of which 5.1 were beside: with a quarter all
    are 8 ms, for 5.1 ms at four fifths of the speed are 4.1.
    """
    if not others.any():
        return 0.0, seconds

    def alone(share: float) -> Floats:
        found: Floats = seconds * (1 / (1 + share * others)).mean(axis=1)
        return found

    def spread(share: float) -> float:
        own = alone(share)
        expected = fitted(works, cold, own, belief)[2]
        return float(((np.minimum(own / expected, HICCUP) - 1) ** 2).mean())

    low, high = 0.0, MOST_BESIDE
    for _ in range(SEARCHED):
        step = (high - low) * (5**0.5 - 1) / 2
        if spread(high - step) < spread(low + step):
            high = low + step
        else:
            low = high - step
    share = (low + high) / 2
    return share, alone(share)


def fitted(
    works: list[Work], cold: Floats, seconds: Floats, belief: StepModel
) -> tuple[Floats, Floats, Floats]:
    """(seconds of each part; of a row beyond each of `CROWDS`, beyond the first beside a prompt,
    and of each step behind one; expected seconds of each step): least squares on relative errors.

    No part is negative and the curve never falls, for its unknowns are how much it rises from knot
    to knot. What the steps do not show is the belief's, who knows
    of no crowds and of no cold caches.
    """
    guessed = np.array([belief.seconds(work) for work in works])
    ratio = float(np.minimum(seconds / guessed, HICCUP).mean())
    guessed *= ratio
    parts = np.array(list(belief.parts.values())) * ratio
    none = np.zeros(len(CROWDS) + 1 + COLD)
    table = np.concatenate([columns(works), cold], axis=1)
    rises = np.concatenate(
        [parts[:1], np.diff(parts[:NUM_BREAKPOINTS]), parts[NUM_BREAKPOINTS:], none]
    )
    scale = np.maximum(rises, 1e-3 * guessed.mean() / np.maximum(table.mean(0), 1e-9))
    scale[NUM_PARTS:-COLD] = guessed.sum() / sum(work.num_tokens for work in works)
    scale[-COLD:] = guessed.mean()
    rows = table * scale / guessed[:, None]
    target = np.minimum(seconds / guessed, HICCUP)
    gram = rows.T @ rows + TRUST * np.eye(len(rises))
    wanted = rows.T @ target + TRUST * rises / scale
    solved = non_negative(gram, wanted, rises / scale) * scale
    curve = np.cumsum(solved[:NUM_BREAKPOINTS])
    found = np.concatenate([curve, solved[NUM_BREAKPOINTS:NUM_PARTS]])
    return found, solved[NUM_PARTS:], table @ solved


def columns(works: list[Work]) -> Floats:
    """A row for each step: by how much each rise of the curve and each unit of the rest counts.

    36 tokens have the rises to all knots up to 32 in full and half of that to 40.
    """
    tokens = np.array([work.num_tokens for work in works], dtype=float)[:, None]
    knots = np.array(BREAKPOINTS, dtype=float)
    reached = np.maximum((tokens - knots[:-1]) / np.diff(knots), 0.0)
    reached[:, :-1] = np.minimum(reached[:, :-1], 1.0)  # beyond the last knot it goes on straight
    rest = np.array([work[1:] for work in works], dtype=float)
    some = (rest[:, :1] > 0).astype(float)
    crowd = np.maximum(rest[:, :1] - np.array(CROWDS, dtype=float), 0.0)
    beside = crowd[:, :1] * (tokens > rest[:, :1])
    return np.concatenate([np.ones((len(works), 1)), reached, some, rest, crowd, beside], axis=1)


def non_negative(gram: Floats, wanted: Floats, start: Floats) -> Floats:
    """The x ≥ 0 with the least xᵀ gram x − 2 wanted x, one coordinate after the other."""
    x = np.maximum(start, 0.0)
    for _ in range(SWEEPS):
        for k in range(len(x)):
            x[k] = max(0.0, x[k] + (wanted[k] - gram[k] @ x) / gram[k, k])
    return x


def ratio_of(new: Prior, old: Prior) -> Floats:
    """What each part of another model or format takes beside that of the one that was measured."""
    ratio: Floats = prior_parts(new) / prior_parts(old)
    return ratio


def check_same(calibration: MachineCalibration, fingerprint: str, told: dict[str, str]) -> None:
    """Raise UsageError where the calibration is of another model, or of settings that cost else."""
    if calibration.fingerprint != fingerprint:
        raise UsageError(
            f"The calibration is of another model: {calibration.model}.",
            "Calibrate this one (headway bench URL --calibrate FILE), or say --transfer.",
        )
    differ = [n for n in COSTS if calibration.settings.get(n) != told.get(n)]
    if differ:
        name = differ[0]
        raise UsageError(
            f"The calibration is of {name} {calibration.settings.get(name)}; here it is "
            f"{told.get(name)}.",
            "Calibrate with that setting, or say --transfer.",
        )


def check_measured_alone(calibration: MachineCalibration, told: dict[str, str]) -> None:
    """Raise UsageError where a setting differs of which no roofline knows what it does to a step.

    A calibration of before, which does not tell them, is of a server that had none of them.
    """
    for name, usual in MEASURED_ALONE.items():
        had, has = calibration.settings.get(name, usual), told.get(name, usual)
        if had != has:
            raise UsageError(
                f"The calibration is of --{name.replace('_', '-')} {had}; here it is {has}.",
                "What such steps take is known by measuring: calibrate a server that has it "
                "(headway bench URL --calibrate FILE).",
            )


COSTS = ("device", "dtype", "kv_dtype", "quantization", "kernels", "attention_backend", "threads")
"""Settings that change what a step costs."""
MEASURED_ALONE = {
    "tensor_parallel_size": "1",
    "pipeline_parallel_size": "1",
    "decode_context_parallel_size": "1",
    "kv_read": "1.0",
    "kv_keep": "1",
}
"""Settings of which no roofline knows what they do to a step, as a server without them tells."""


@dataclass(slots=True)
class Roofline:
    """A machine that nobody measured: bytes and FLOPs over what it reaches of its datasheet.

    Never a time to print: efficiencies are a judgement, so the answer is an interval of two.
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
    reach: Reach = field(default_factory=lambda: Reach((2**62,) * 4))

    def seconds(self, work: Work) -> float:
        self.reach.count(work)
        tokens, sampled, attended, read = work
        if not tokens:
            return self.fixed_s
        reading_s = self.weights_s + self.read_s * read + (self.head_s if sampled else 0.0)
        computing_s = self.token_s * tokens + self.attended_s * attended + self.sampled_s * sampled
        return max(reading_s, computing_s) + self.fixed_s + self.token_link_s * tokens
