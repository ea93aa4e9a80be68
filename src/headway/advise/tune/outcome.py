"""The result of a tuning: the choice and its reason, all tried settings, and the file for
`--config`."""

import os
import tempfile
from collections.abc import Iterable
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import msgspec

from headway.advise.tune.confirm import MIN_GOODPUT_RATIO, Z_95, ConfirmedSetting
from headway.advise.tune.search import Point
from headway.advise.tune.space import Changes
from headway.core.errors import UsageError

MIN_GAIN = 0.02
"""Least gain that is worth a change."""
MIN_SIMULATION_ERROR = 0.15
"""Least error of a simulated gain."""
MIN_REAL_ERROR = 0.005
"""Least error of a real gain, however many requests it has."""


class TuningReport(msgspec.Struct, kw_only=True):
    """The complete result. `chosen` is () where there is nothing to gain, as `why` then says."""

    format: str = "headway-tune"
    model: str
    label: str
    prefer: str
    chosen: Changes
    why: str
    confirmed: list[ConfirmedSetting]
    points: list[Point]
    refused: dict[str, str]
    gated: dict[str, str]
    """Setting that changes tokens → the verdict of its evaluation."""
    num_simulated: int
    num_left_out: int = 0
    """Settings that the search had no time for."""
    real_runs: int
    seconds: float
    extrapolated: float
    defaults: dict[str, Any]

    @property
    def gains(self) -> bool:
        return bool(self.chosen)


def choose(
    points: list[Point], confirmed: list[ConfirmedSetting], prefer: str
) -> tuple[Changes, str]:
    """Return (the setting, why): from real runs where there are any, else the simulation's best.

    A setting wins over the default only with a combined gain whose 95% interval is above 0; with
    another preference also where its goodput is surely not 5% below the default's and it is clearly
    better in the preferred figure.
    """
    default = next(point for point in points if not point.changes)
    if not confirmed:
        return by_simulation(points, default, prefer)
    if not any(each.runs for each in confirmed):
        _, simulated = by_simulation(points, default, prefer)
        return (), f"Not confirmed, for no time was left: give more --minutes. {simulated}"
    base = confirmed[0]
    if base.died:
        return (), f"The default itself does not run: {base.died}"
    alive = [each for each in confirmed[1:] if not each.died and each.runs]
    add_simulated_gains(alive, points)
    winners = [each for each in alive if wins(each, base, prefer)]
    if not winners:
        best = max(alive, key=lambda each: each.together, default=None)
        if best is None:
            return (), "Nothing to gain: no other setting ran to its end."
        return (
            (),
            f"Nothing to gain: of {len(confirmed) - 1} finalists the best is {format_gain(best)}.",
        )
    best = max(winners, key=lambda each: preference_score(each, prefer))
    return (
        best.changes,
        f"{format_gain(best)}, in {best.runs} run{'s each' if best.runs > 1 else ''}.",
    )


def format_gain(one: ConfirmedSetting) -> str:
    """Return a setting's gain in words: real runs, simulation, and both together."""
    low, high = one.gain_interval
    text = (
        f"{one.name}: {one.gain:+.1%} goodput ({low:+.1%} to {high:+.1%}) on the real server "
        "beside the default"
    )
    if one.simulated is None:
        return text
    low, high = one.together_interval
    return (
        f"{text}; {one.simulated:+.1%} simulated; together {one.together:+.1%} "
        f"({low:+.1%} to {high:+.1%})"
    )


def wins(one: ConfirmedSetting, base: ConfirmedSetting, prefer: str) -> bool:
    """Return whether a setting is surely better than the default."""
    low, _ = one.together_interval
    if low > 0 and one.together >= MIN_GAIN:
        return True
    if prefer == "goodput" or low < -0.05:
        return False
    return preference_score(one, prefer) > preference_score(base, prefer) * (1 + 5 * MIN_GAIN)


def preference_score(one: ConfirmedSetting, prefer: str) -> float:
    """Return the preferred figure; more is better."""
    return {
        "goodput": 1 + one.together,
        "ttft": 1 / (one.ttft_s or 1e9),
        "tpot": 1 / (one.tpot_s or 1e9),
        "throughput": one.tokens_per_s,
    }[prefer]


def by_simulation(points: list[Point], default: Point, prefer: str) -> tuple[Changes, str]:
    """Return the simulation's best where no real run confirmed it, as the text says."""
    best = points[0]
    gain = best.goodput / default.goodput - 1 if default.goodput else 0.0
    if not best.changes or (prefer == "goodput" and gain < MIN_GAIN):
        return (), (
            f"Nothing to gain: the default is within {max(gain, 0):.1%} of the best that was "
            "simulated."
        )
    return best.changes, (
        f"{best.name}: {gain:+.1%} goodput by simulation ({best.label}); no real run has confirmed "
        "it."
    )


def format_yaml(report: TuningReport) -> str:
    """Return the file for `--config`: a line for each option, with its default and its gain."""
    lines = [f"# headway tune, {report.model}: {report.why}"]
    lines.append(
        f"# {report.num_simulated} simulations ({report.label}), {report.real_runs} real runs, "
        f"{report.seconds:.0f} s; prefers {report.prefer}"
    )
    if not report.chosen:
        lines.append("# No option is set: the defaults stay.")
    for name, value in report.chosen:
        alone = gain_alone(report, name, value)
        alone_note = "" if alone is None else f"; alone {alone:+.1%} goodput, simulated"
        lines.append(f"{name}: {value}  # default {report.defaults.get(name)}{alone_note}")
    return "\n".join([*lines, ""])


def gain_alone(report: TuningReport, name: str, value: Any) -> float | None:
    """Return the gain of one change alone in the last rung, where it was there."""
    points = {point.changes: point for point in report.points}
    default, one = points.get(()), points.get(((name, value),))
    if default is None or one is None or not default.goodput:
        return None
    return one.goodput / default.goodput - 1


def check_writable(path: str) -> None:
    """Raise UsageError where no file can be written, before an hour is spent on its content."""
    target = Path(path).resolve()
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError(f"--write {path} cannot be written.", "Name a file in a folder of yours.")


def write_atomically(path: str, text: str) -> None:
    """Replace the file as a whole: a Ctrl-C in the middle leaves the old one."""
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=target.resolve().parent, prefix=".headway-", delete=False, encoding="utf-8"
        ) as new:
            new.write(text)
        os.replace(new.name, target)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error


def format_lines(report: TuningReport) -> list[str]:
    """Return what the terminal shows beside the tables."""
    lines = [report.why]
    lines += [f"real run, {each.name}: {each.reason}" for each in report.confirmed if each.reason]
    lines += [f"not tried, {name}: {why}" for name, why in list(report.refused.items())[:5]]
    lines += [f"gate, {name}: {verdict}" for name, verdict in report.gated.items()]
    lines += [f"died, {each.name}: {each.died}" for each in report.confirmed if each.died]
    if report.num_left_out:
        lines.append(
            f"{report.num_left_out} settings were not simulated for lack of time: raise --minutes"
        )
    if report.extrapolated:
        lines.append(f"{report.extrapolated:.0%} of the default's steps lie beyond the calibration")
    return lines


# ── simulation and real runs together ───────────────────────────────────────────────────────


def add_simulated_gains(alive: list[ConfirmedSetting], points: Iterable[Point]) -> None:
    """Fill in the simulated and the combined gain of settings that ran beside the default.

    Both have errors: real runs of a minute by chance, a simulation by its model. The error of the
    simulation is estimated where both are known: by the difference of its gains from the real ones,
    less the chance error of those, and it is never taken as less than 15%. The combined gain is the
    mean of the two, weighted by their precision (empirical Bayes: Efron and Morris, "Data Analysis
    Using Stein's Estimator and its Generalizations", 1975), in logarithms, since gains multiply.

        real +14% (-1 to +31%)   simulated +12%, off by 15%   together +14% ( 0 to +29%)
        real  +1% (-12 to +16%)  simulated +12%, off by 15%   together  +3% (-9 to +17%)
        real +14% (-1 to +31%)   simulated -30%, off by 48%   together +13% (-2 to +30%)
    """
    goodput = {point.changes: point.goodput for point in points}
    base = goodput.get((), 0.0)
    for one in alive:
        one.together, one.together_interval = one.gain, one.gain_interval
        is_known = base > 0 and one.changes in goodput
        one.simulated = round(goodput[one.changes] / base - 1, 4) if is_known else None
    known = [one for one in alive if one.simulated is not None]
    off = simulation_error(known)
    for one in known:
        gain, low, high = combine(one, off)
        one.together, one.together_interval = round(gain, 4), (round(low, 4), round(high, 4))


def simulation_error(known: list[ConfirmedSetting]) -> float:
    """Return the error of the simulation, as a standard deviation of logarithms."""
    if not known:
        return MIN_SIMULATION_ERROR
    squares = [
        (log_gain(one.gain) - log_gain(one.simulated or 0.0)) ** 2 - real_gain_error(one) ** 2
        for one in known
    ]
    return sqrt(max(sum(squares) / len(known), MIN_SIMULATION_ERROR**2))


def combine(one: ConfirmedSetting, off: float) -> tuple[float, float, float]:
    """Return (gain, from, to) of simulation and real runs."""
    real, simulated = 1 / real_gain_error(one) ** 2, 1 / off**2
    mean = real * log_gain(one.gain) + simulated * log_gain(one.simulated or 0.0)
    mean /= real + simulated
    reach = Z_95 / sqrt(real + simulated)
    return exp(mean) - 1, exp(mean - reach) - 1, exp(mean + reach) - 1


def real_gain_error(one: ConfirmedSetting) -> float:
    """Return the standard error of a real gain's logarithm."""
    low, high = one.gain_interval
    return max((log_gain(high) - log_gain(low)) / (2 * Z_95), MIN_REAL_ERROR)


def log_gain(gain: float) -> float:
    """Return a gain as a logarithm."""
    return log(max(1 + gain, MIN_GOODPUT_RATIO))
