"""Progress bars on stderr: bytes of a loading model, finished items, training steps.

Each yields a function to call, and forecasts the remaining time. If stderr is no terminal, loading
prints a line at its start, and the others a line now and then.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LINE_INTERVAL_S = 30.0
"""Seconds between the lines about finished items where stderr is no terminal."""


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a bar with the remaining time; call with (bytes done, bytes in all)."""
    if not sys.stderr.isatty():
        print_line(f"{label} …")
        yield lambda done, total: None
        return
    from rich.console import Console  # late: start-up prints within 300 ms
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def items_bar(label: str, total: int, show: bool = True) -> Iterator[Callable[[], None]]:
    """Yield a bar of finished items; call once per item.

    If stderr is no terminal, a line with the remaining time is printed every `LINE_INTERVAL_S`.
    """
    if not show:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield item_lines(label, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def item_lines(
    label: str, total: int, now_s: Callable[[], float] = time.perf_counter
) -> Callable[[], None]:
    """Return a function that counts an item and prints a line if the last one is old."""
    began_s = last_s = now_s()
    done = 0

    def advance() -> None:
        nonlocal done, last_s
        done += 1
        now = now_s()
        if now - last_s >= LINE_INTERVAL_S and done < total:
            last_s = now
            remaining_s = (now - began_s) / done * (total - done)
            print_line(f"{label}: {done}/{total}, {format_remaining(remaining_s)}")

    return advance


def format_remaining(seconds: float) -> str:
    """Format a forecast: 50 → "50 s left", 150 → "3 min left"."""
    return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"


def print_line(text: str) -> None:
    """Print on stderr, even where the disk behind it is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def steps_bar(label: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Yield a bar of training steps with the remaining time; call with (steps done, status text).

    If stderr is no terminal, about ten lines are printed, each with the remaining time.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description} {task.completed}/{task.total}"),
            *(BarColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn()),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, completed=done, status="")
            yield lambda now, status: bar.update(task, completed=now, status=status)
        return
    began, every, num_lines = time.perf_counter(), max(1, total // 10), done // max(1, total // 10)

    def line(now: int, status: str) -> None:
        nonlocal num_lines
        if now // every > num_lines or now == total:
            num_lines = now // every
            remaining_s = (time.perf_counter() - began) / max(1, now - done) * (total - now)
            print_line(f"{label} {now}/{total}: {status}, {format_remaining(remaining_s)}")

    yield line
