"""Progress of long work on stderr: bytes while a model loads, prompts while they are answered.

Given a label it yields a function to call; where stderr is no terminal a line says that work has
begun and nothing else is printed.
"""

import sys
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
