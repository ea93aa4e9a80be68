"""Forks: sequences of one request (`n` > 1) that share the prompt computed by the first."""

from headway.engine.kv import KVCache
from headway.engine.sequence import RUNNING, Sequence


def limit_to_fork_point(kv: KVCache, sequence: Sequence, count: int) -> int:
    """Return `count`, or fewer: up to the last prompt token where forks copy a state there."""
    last = sequence.num_prompt - 1
    if kv.states is None or not sequence.forks or sequence.computed >= last:
        return count
    return min(count, last - sequence.computed)


def are_forks_due(kv: KVCache, parent: Sequence) -> bool:
    """Return whether forks start before the first sample.

    A recurrent state can be shared only while it is the one behind the last token but one.
    """
    return kv.states is not None and parent.computed == parent.num_prompt - 1


def start_forks(
    kv: KVCache, parent: Sequence, num_rows: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Return (forks that run, at most `num_rows`; forks that wait).

    The prompt of `parent` is computed: its forks share all but the last token, and each computes
    that one again, as a decode row, for a sample of its own. Those that wait compute the prompt
    themselves.
    """
    forks, parent.forks = parent.forks, []
    shared = parent.num_prompt - 1
    is_there = parent.computed >= parent.num_prompt
    if kv.states is not None:
        is_there = parent.computed == shared or not shared
    started = forks[: max(num_rows, 0)] if is_there else []
    for child in started:
        kv.fork(parent, child, shared)
        child.state = RUNNING
    return started, forks[len(started) :]
