"""Progress of long work on stderr: bytes while a model loads, prompts while they are answered.

Given a label it yields a function to call; where stderr is no terminal a line says that work has
begun and nothing else is printed.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with an estimate of the time left; call with (bytes done, bytes in all)."""
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
    """A bar of finished items; call once an item. Silent where stderr is no terminal."""
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
    """A bar of training steps with the time left; call with (steps done, what to say of them).

    Where stderr is no terminal, a line about ten times, each with the time left.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description} {task.completed}/{task.total}"),
            *(BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn()),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, completed=done, said="")
            yield lambda now, said: bar.update(task, completed=now, said=said)
        return
    began, every, told = time.perf_counter(), max(1, total // 10), done // max(1, total // 10)

    def line(now: int, said: str) -> None:
        nonlocal told
        if now // every > told or now == total:
            told = now // every
            left = (time.perf_counter() - began) / max(1, now - done) * (total - now)
            text = f"{label} {now}/{total}: {said}, {left / 60:.0f} min left"
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    yield line
