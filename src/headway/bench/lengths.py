"""Distributions of prompt and answer lengths: their notation and their samples.

`512` is always 512 tokens, `uniform:64-256` any length between, `normal:256,64` mean and standard
deviation, `lognormal:256,0.8` median and the standard deviation of the logarithm. No length is
below one token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError

Lengths = NDArray[np.int64]
EXAMPLES = "Write 512, uniform:64-256, normal:256,64 or lognormal:256,0.8."
Draw = Callable[[np.random.Generator, int, float, float], NDArray[np.generic]]
DISTRIBUTIONS: dict[str, tuple[str, Draw]] = {
    "fixed": ("", lambda rng, n, a, b: np.full(n, a)),
    "uniform": ("-", lambda rng, n, a, b: rng.integers(int(a), int(b), n, endpoint=True)),
    "normal": (",", lambda rng, n, a, b: rng.normal(a, b, n)),
    "lognormal": (",", lambda rng, n, a, b: rng.lognormal(np.log(a), b, n)),
}
"""Name → the separator of its two numbers, and the function that draws n values."""


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution by name with its numbers."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> Lengths:
        """Return `count` lengths of at least one token."""
        values = DISTRIBUTIONS[self.kind][1](rng, count, self.first, self.second)
        lengths: Lengths = np.maximum(np.rint(values).astype(np.int64), 1)
        return lengths


def parse_length(text: str, source: str) -> Length:
    """Parse `lognormal:256,0.8` → Length("lognormal", 256, 0.8); UsageError names `source`."""
    kind, colon, numbers = text.partition(":")
    if not colon:
        kind, numbers = "fixed", text
    if kind not in DISTRIBUTIONS:
        raise UsageError(f"{source}: there is no distribution {kind!r}.", EXAMPLES)
    separator = DISTRIBUTIONS[kind][0]
    try:
        parts = [float(part) for part in (numbers.split(separator) if separator else [numbers])]
    except ValueError:
        parts = []
    if len(parts) != (2 if separator else 1) or not all(np.isfinite(parts)):
        raise UsageError(f"{source}: {text!r} is not a distribution of lengths.", EXAMPLES)
    if parts[0] < 1 or (kind == "uniform" and parts[1] < parts[0]) or min(parts) < 0:
        raise UsageError(f"{source}: {text!r} is out of range.", EXAMPLES)
    return Length(kind, *parts)
