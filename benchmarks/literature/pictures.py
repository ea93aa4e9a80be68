"""Pictures of a finding: bars, bars in groups, lines."""

from collections.abc import Mapping, Sequence

from headway.measure.plot import Plot, Series


def bars(rows: Sequence[tuple[str, float]], title: str) -> Plot:
    """A bar a row."""
    names, values = [name for name, _ in rows], [float(value) for _, value in rows]
    return plot("", title, [Series(kind="bars", x=names, y=values)])


def groups(across: Sequence[str], rows: Mapping[str, Sequence[float]], title: str) -> Plot:
    """For each of `across` a bar of every row."""
    return plot(
        "",
        title,
        [
            Series(kind="bars", name=name, x=list(across), y=list(map(float, values)))
            for name, values in rows.items()
        ],
    )


def lines(x: Sequence[float], rows: Mapping[str, Sequence[float]], across: str, up: str) -> Plot:
    """A line a row."""
    return plot(
        across,
        up,
        [
            Series(kind="both", name=name, x=list(map(float, x)), y=list(map(float, values)))
            for name, values in rows.items()
        ],
    )


def plot(across: str, up: str, series: Sequence[Series]) -> Plot:
    """A plot that gets its title and its sentence where it is shown."""
    return Plot(title="", caption="", x=across, y=up, series=series)
