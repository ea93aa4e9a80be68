"""A live line on stderr during a load; nothing where stderr is no terminal."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from headway.bench.load import LoadGenerator
from headway.bench.run import Watch
from headway.measure.client import Client

REFRESH_PER_S = 4
RECENT = 50


@contextmanager
def live() -> Iterator[Watch | None]:
    """Yield a function that shows a load until the next one, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(
        console=Console(stderr=True), refresh_per_second=REFRESH_PER_S, transient=True
    ) as bar:

        def watch(load: LoadGenerator, client: Client, span_s: float) -> None:
            bar.update(ProgressLine(load, client, span_s), refresh=True)

        yield watch


class ProgressLine:
    """The line, rendered again at each refresh by rich's thread."""

    def __init__(self, load: LoadGenerator, client: Client, span_s: float) -> None:
        self._load = load
        self._client = client
        self._span_s = span_s

    def __rich__(self) -> str:
        return line(self._load, self._client, self._span_s)


def line(load: LoadGenerator, client: Client, span_s: float) -> str:
    """Return "12.0/60.0 s · sent 48 · in flight 9 · done 38 · failed 1 (timeout 1) · 1,204 tok/s
    …"."""
    now_s = max(client.now_s(), 1e-9)
    exchanges = load.exchanges
    recent = [x.chunk_s[0] - x.scheduled_s for x in exchanges[-RECENT:] if x.chunk_s]
    reasons = Counter(x.error for x in exchanges if x.error)
    done = len(exchanges) - load.running - reasons.total()
    failed = f" ({', '.join(f'{r} {n}' for r, n in reasons.items())})" if reasons else ""
    wait = f" · recent TTFT {sorted(recent)[len(recent) // 2] * 1e3:.0f} ms" if recent else ""
    return (
        f"{now_s:.1f}/{span_s:.1f} s · sent {len(exchanges)} · in flight {load.running} · "
        f"done {done} · failed {reasons.total()}{failed} · "
        f"{client.tokens / now_s:,.0f} tok/s{wait}"
    )
