"""Most steps ask for no draft tokens where these do not pay; probes follow after
16, 32, 64 steps."""

from itertools import pairwise

import pytest

from headway.engine.speculation.backoff import PATIENCE, PROBE_STEPS, Backoff, NoBackoff


def due_steps(backoff: Backoff, count: int, *, paid: bool, **more: int) -> list[int]:
    """Those of `count` steps in which it is due; all of them pay, or none."""
    found = []
    for step in range(1, count + 1):
        if backoff.is_due(**more):
            found.append(step)
            backoff.record(paid=paid)
    return found


def test_what_pays_is_asked_for_in_every_step():
    assert due_steps(Backoff(), 100, paid=True) == [*range(1, 101)]


def test_what_does_not_pay_is_probed_after_longer_and_longer_pauses():
    found = due_steps(Backoff(), 400, paid=False)
    assert found[:PATIENCE] == [*range(1, PATIENCE + 1)]
    probes = [step - PATIENCE for step in found[PATIENCE:]]
    begins = [step for step in probes if step - 1 not in probes]
    assert begins[:5] == [17, 17 + 36, 17 + 36 + 68, 17 + 36 + 2 * 68, 17 + 36 + 3 * 68]
    assert probes[:PROBE_STEPS] == [*range(17, 17 + PROBE_STEPS)]


def test_a_probe_that_pays_ends_the_pauses():
    backoff = Backoff()
    due_steps(backoff, 300, paid=False)
    assert backoff.is_active
    first = next(step for step in range(1, 100) if backoff.is_due())
    backoff.record(paid=True)
    assert first <= 65 and not backoff.is_active
    assert due_steps(backoff, 50, paid=True) == [*range(1, 51)]
    found = due_steps(backoff, PATIENCE + 17, paid=False)
    assert found == [*range(1, PATIENCE + 1), PATIENCE + 17], "the first pause is short again"


def test_one_step_that_pays_among_those_that_do_not_is_enough():
    backoff = Backoff()
    for step in range(1, 200):
        assert backoff.is_due()
        backoff.record(paid=step % (PATIENCE - 1) == 0)


@pytest.mark.parametrize("most", [1, 4, 16])
def test_few_decodes_are_probed_for_sooner(most: int):
    found = due_steps(Backoff(), 200, paid=False, max_interval=most)[PATIENCE:]
    pauses = [later - step - 1 for step, later in pairwise(found) if later > step + 1]
    assert len(pauses) > 4 and set(pauses) == {most}


def test_without_patience_there_are_probes_alone():
    found = due_steps(Backoff(0, 1024, probe_steps=1), 4096, paid=False)
    assert found[:4] == [17, 50, 115, 244]
    assert found[-1] - found[-2] == 1025


def test_without_backoff_every_step_is_due():
    backoff = NoBackoff()
    assert due_steps(backoff, 100, paid=False) == [*range(1, 101)] and not backoff.is_active
