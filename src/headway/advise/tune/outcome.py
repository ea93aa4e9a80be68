"""What a tuning found: the choice and why, all that was tried, and the file for `--config`."""

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from headway.advise.tune.confirm import Confirmed
from headway.advise.tune.search import Point
from headway.advise.tune.space import Changes
from headway.advise.tune.together import join
from headway.core.errors import UsageError

LEAST_GAIN = 0.02
"""What a change must bring to be worth a line."""


class Tuned(msgspec.Struct, kw_only=True):
    """All of it. `chosen` is () where nothing is to be gained, as `why` then says."""

    format: str = "headway-tune"
    model: str
    label: str
    prefer: str
    chosen: Changes
    why: str
    confirmed: list[Confirmed]
    points: list[Point]
    refused: dict[str, str]
    gated: dict[str, str]
    """Setting that changes tokens → what its evaluation said."""
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


def choose(points: list[Point], confirmed: list[Confirmed], prefer: str) -> tuple[Changes, str]:
    """(the setting, why): confirmed where there were real runs, else the simulation's.

    A setting wins over the default only with a gain whose 95% lie above 0, by real runs and
    simulation together; with another preference also where its goodput is surely not a twentieth
    below the default's and it is better in that.
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
    join(alive, points)
    winners = [each for each in alive if wins(each, base, prefer)]
    if not winners:
        best = max(alive, key=lambda each: each.together, default=None)
        if best is None:
            return (), "Nothing to gain: no other setting ran to its end."
        return (), f"Nothing to gain: of {len(confirmed) - 1} finalists the best is {gained(best)}."
    best = max(winners, key=lambda each: worth(each, prefer))
    return best.changes, f"{gained(best)}, in {best.runs} run{'s each' if best.runs > 1 else ''}."


def gained(one: Confirmed) -> str:
    """A setting's gain as it is told: what ran, what was simulated, and both together."""
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


def wins(one: Confirmed, base: Confirmed, prefer: str) -> bool:
    """Whether it is surely better than the default."""
    low, _ = one.together_interval
    if low > 0 and one.together >= LEAST_GAIN:
        return True
    if prefer == "goodput" or low < -0.05:
        return False
    return worth(one, prefer) > worth(base, prefer) * (1 + 5 * LEAST_GAIN)


def worth(one: Confirmed, prefer: str) -> float:
    """What is preferred, more is better."""
    return {
        "goodput": 1 + one.together,
        "ttft": 1 / (one.ttft_s or 1e9),
        "tpot": 1 / (one.tpot_s or 1e9),
        "throughput": one.tokens_per_s,
    }[prefer]


def by_simulation(points: list[Point], default: Point, prefer: str) -> tuple[Changes, str]:
    """Without a real run the simulation's best, and the words say so."""
    best = points[0]
    gain = best.goodput / default.goodput - 1 if default.goodput else 0.0
    if not best.changes or (prefer == "goodput" and gain < LEAST_GAIN):
        return (), (
            f"Nothing to gain: the default is within {max(gain, 0):.1%} of the best that was "
            "simulated."
        )
    return best.changes, (
        f"{best.name}: {gain:+.1%} goodput by simulation ({best.label}); no real run has confirmed "
        "it."
    )


def yaml_of(found: Tuned) -> str:
    """The file for `--config`: a line for each option, its default and its gain behind it."""
    lines = [f"# headway tune, {found.model}: {found.why}"]
    lines.append(
        f"# {found.num_simulated} simulations ({found.label}), {found.real_runs} real runs, "
        f"{found.seconds:.0f} s; prefers {found.prefer}"
    )
    if not found.chosen:
        lines.append("# No option is set: the defaults stay.")
    for name, value in found.chosen:
        alone = gain_alone(found, name, value)
        said_alone = "" if alone is None else f"; alone {alone:+.1%} goodput, simulated"
        lines.append(f"{name}: {value}  # default {found.defaults.get(name)}{said_alone}")
    return "\n".join([*lines, ""])


def gain_alone(found: Tuned, name: str, value: Any) -> float | None:
    """What the one change gave in the last rung, where it was there."""
    points = {point.changes: point for point in found.points}
    default, one = points.get(()), points.get(((name, value),))
    if default is None or one is None or not default.goodput:
        return None
    return one.goodput / default.goodput - 1


def check_place(path: str) -> None:
    """Raise UsageError where no file can be written, before an hour is spent on its content."""
    target = Path(path).resolve()
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError(f"--write {path} cannot be written.", "Name a file in a folder of yours.")


def write_whole(path: str, text: str) -> None:
    """The file as a whole or as it was: a Ctrl-C in the middle leaves the old one."""
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=target.resolve().parent, prefix=".headway-", delete=False, encoding="utf-8"
        ) as new:
            new.write(text)
        os.replace(new.name, target)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error


def lines_of(found: Tuned) -> list[str]:
    """What the terminal shows beside the tables."""
    lines = [found.why]
    lines += [f"real run, {each.name}: {each.taken}" for each in found.confirmed if each.taken]
    lines += [f"not tried, {name}: {why}" for name, why in list(found.refused.items())[:5]]
    lines += [f"gate, {name}: {said_}" for name, said_ in found.gated.items()]
    lines += [f"died, {each.name}: {each.died}" for each in found.confirmed if each.died]
    if found.num_left_out:
        lines.append(f"{found.num_left_out} settings were left out of the search: more --minutes")
    if found.extrapolated:
        lines.append(f"{found.extrapolated:.0%} of the default's steps lie beyond the calibration")
    return lines
