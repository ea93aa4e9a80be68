"""Assertions that hold between steps for all sequences of an engine."""

from collections.abc import Iterable

from headway.engine.batching import BatchGate
from headway.engine.sequence import RUNNING, WAITING, WAITING_FOR_KV, Sequence


def check_places(
    running: list[Sequence],
    waiting: Iterable[Sequence],
    gate: BatchGate,
    by_id: dict[int, Sequence],
) -> list[Sequence]:
    """Assert that every sequence is in one place and sound, and that the runtime knows `by_id`.

    Return all of them, waiting forks included.
    """
    assert all(s.state in (RUNNING, WAITING_FOR_KV) for s in running)
    assert all(s.state == WAITING for s in [*waiting, *gate])
    gate.check_integrity()
    known = [s for s in running if s.known_to_runtime]
    assert {s.sequence_id for s in known} == set(by_id), "the runtime's ids differ"
    queued = [*running, *waiting, *gate]
    sequences = queued + [fork for parent in queued for fork in parent.forks]
    assert len({s.sequence_id for s in sequences}) == len(sequences), "a sequence is twice"
    for sequence in sequences:
        sequence.check_integrity()
        assert sequence.known_to_runtime or not sequence.room, "room that the runtime does not know"
    return sequences
