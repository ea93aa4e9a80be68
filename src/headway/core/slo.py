"""Service-level objectives: their notation, and which of them a request missed.

`ttft=500ms,tpot=50ms` is a set of objectives, `interactive:ttft=500ms,tpot=50ms` the same for the
class `interactive`. Server, load generator and simulator parse and judge with these functions, so a
request that meets its objectives in one meets them in all.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.core.errors import UsageError

DEFAULT_CLASS = "default"
"""Class of requests that name none."""
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m)")
CLASS_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
EXAMPLE = "Write ttft=500ms,tpot=50ms (also itl_p99 and e2e; units us, ms, s, m)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Upper bounds in seconds; None is no objective. A bound that is just reached is met.

    >>> Slo(ttft_s=0.5, tpot_s=0.05).missed(0.4, 0.06, None, 3.0)
    ('tpot',)
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None
    e2e_s: float | None = None

    def missed(
        self,
        ttft_s: float | None,
        tpot_s: float | None,
        itl_p99_s: float | None,
        e2e_s: float | None,
    ) -> tuple[str, ...]:
        """Return the objectives that a request missed, in the order of `OBJECTIVES`; () for none.

        None means that a latency does not exist: an answer of one token has no TPOT and cannot miss
        it. A failed request has no latencies; its caller decides whether it missed.
        """
        measured = (ttft_s, tpot_s, itl_p99_s, e2e_s)
        return tuple(
            name
            for name, bound, value in zip(OBJECTIVES, self.bounds(), measured, strict=True)
            if bound is not None and value is not None and value > bound
        )

    def bounds(self) -> tuple[float | None, ...]:
        """Return the bounds in the order of `OBJECTIVES`."""
        return (self.ttft_s, self.tpot_s, self.itl_p99_s, self.e2e_s)

    def __str__(self) -> str:
        """Format as it is written: ttft=500ms,tpot=50ms."""
        return ",".join(
            f"{name}={format_duration(bound)}"
            for name, bound in zip(OBJECTIVES, self.bounds(), strict=True)
            if bound is not None
        )


OBJECTIVES = ("ttft", "tpot", "itl_p99", "e2e")


def parse_slo(text: str) -> Slo:
    """Parse `ttft=500ms,tpot=50ms`; UsageError names the part at fault."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"SLO {text!r}: {part.strip()!r} is no objective.", EXAMPLE)
        if name not in OBJECTIVES:
            raise UsageError(
                f"SLO {text!r}: there is no objective {name}.",
                f"There are: {', '.join(OBJECTIVES)}.",
            )
        if name in bounds:
            raise UsageError(f"SLO {text!r}: {name} is given twice.", EXAMPLE)
        bounds[name] = parse_duration(value, f"SLO {text!r}: {name}")
    return Slo(**{f"{name}_s": bound for name, bound in bounds.items()})


def parse_class(text: str) -> tuple[str, Slo]:
    """Parse `interactive:ttft=500ms` to ("interactive", its Slo); without a name the default."""
    name, colon, objectives = text.partition(":")
    if not colon:
        return DEFAULT_CLASS, parse_slo(text)
    if not CLASS_NAME.fullmatch(name):
        raise UsageError(
            f"SLO {text!r}: {name!r} is no name of a class.",
            "Use letters, digits, dot, dash and underscore: interactive:ttft=500ms.",
        )
    return name, parse_slo(objectives)


def parse_classes(texts: Iterable[str]) -> dict[str, Slo]:
    """Return class → Slo, of one text per class; UsageError for a class given twice."""
    classes: dict[str, Slo] = {}
    for text in texts:
        name, slo = parse_class(text)
        if name in classes:
            raise UsageError(
                f"SLO {text!r}: class {name} is given twice.",
                "Put its objectives in one text: interactive:ttft=500ms,tpot=50ms.",
            )
        classes[name] = slo
    return classes


def parse_duration(text: str, source: str) -> float:
    """Return seconds > 0: 500ms → 0.5, 1.5s → 1.5, 2m → 120. A number without a unit is refused."""
    match = DURATION.fullmatch(text)
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{source}: {text!r} is not a duration.", "Write 500ms, 1.5s or 2m.")
    return seconds


def format_duration(seconds: float) -> str:
    """Format seconds: 0.5 → 500ms, 2.0 → 2s, 0.00025 → 250us."""
    for unit in ("s", "ms"):
        number = round(seconds / UNITS_S[unit], 6)
        if number >= 1:
            return f"{number:.15g}{unit}"
    return f"{round(seconds / UNITS_S['us'], 6):.15g}us"
