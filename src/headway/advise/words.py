"""Figures as text: 0.0123 s is 12.3 ms, 0.814 is 81%, 0.00042 dollars are $0.00042."""


def duration(seconds: float | None) -> str:
    """Format seconds: 0.0123 → 12.3 ms, 1.5 → 1.5 s, 90 → 90 s; unknown → –."""
    if seconds is None:
        return "–"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 20 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def percent(share: float | None) -> str:
    """Format a share: 0.814 → 81%."""
    return "–" if share is None else f"{share:.0%}"


def dollars(usd: float) -> str:
    """Format dollars: $5.56, $0.042, $0.00012."""
    return f"${usd:.2f}" if abs(usd) >= 0.1 else f"${usd:.2g}"


def tokens(count: float | None) -> str:
    """Format a number of tokens: 1234.4 → 1,234."""
    return "–" if count is None else f"{count:,.0f}"


def plural(count: float, noun: str) -> str:
    """Format a count with its noun: (1, "request") → 1 request; (2.6, "request") → 2.6 requests."""
    number = f"{count:.0f}" if count == round(count) or count >= 10 else f"{count:.1f}"
    return f"{number} {noun}" + ("" if number == "1" else "s")


def rate(per_s: float, unit: str) -> str:
    """Format a rate with its prefix: 17e9, "B/s" → 17.0 GB/s."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_s >= factor:
            return f"{per_s / factor:.3g} {prefix}{unit}"
    return f"{per_s:.3g} {unit}"
