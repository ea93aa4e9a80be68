"""Progress bars on stderr: bytes of a loading model, finished items, training steps.

Each yields a function to call. If stderr is no terminal, only a line at the start is printed.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a bar with the remaining time; call with (bytes done, bytes in all)."""
    if not sys.stderr.isatty():
        with suppress(OSError):  # a full disk behind stderr
            print(f"{label} …", file=sys.stderr, flush=True)
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
    """Yield a bar of finished items; call once per item. Silent if stderr is no terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


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
            text = f"{label} {now}/{total}: {status}, {remaining_s / 60:.0f} min left"
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    yield line
