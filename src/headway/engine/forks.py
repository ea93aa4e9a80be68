"""Siblings of one request (`n` > 1): they begin with the prompt that the first of them computed."""

from headway.engine.kv import KVCache
from headway.engine.sequence import RUNNING, Sequence


def before_forks(kv: KVCache, sequence: Sequence, count: int) -> int:
    """`count`, or up to the last token of a prompt, where siblings take a state from there."""
    last = sequence.num_prompt - 1
    if kv.states is None or not sequence.forks or sequence.computed >= last:
        return count
    return min(count, last - sequence.computed)


def are_due(kv: KVCache, parent: Sequence) -> bool:
    """Whether siblings start before the first sample: a state is shared while it is that behind the
    last token but one."""
    return kv.states is not None and parent.computed == parent.num_prompt - 1


def start_forks(
    kv: KVCache, parent: Sequence, num_rows: int
) -> tuple[list[Sequence], list[Sequence]]:
    """(siblings that run, siblings that queue up), `num_rows` of the first at most.

    The prompt of `parent` is computed: its siblings share it, all but the last token. Each computes
    that token again, as a decode row, for a sample of its own. Those that queue up compute the
    prompt themselves, as all do where its queries choose what is kept of it.
    """
    forks, parent.forks = parent.forks, []
    shared = parent.num_prompt - 1
    is_there = parent.computed >= parent.num_prompt and not parent.is_watched
    if kv.states is not None:
        is_there = parent.computed == shared or not shared
    started = forks[: max(num_rows, 0)] if is_there else []
    for child in started:
        kv.fork(parent, child, shared)
        child.state = RUNNING
    return started, forks[len(started) :]
