"""An executor without computation, to measure all other parts of the system.

Every sampled row gets the next id of a fixed cycle of ordinary tokens, after a sleep of `step_s`
seconds in place of the device's step. It has no state of sequences.
"""

import time

from headway.core.plan import Description, GrammarMasks, Sample, StepPlan, StepResult


class NullExecutor:
    """Answers every plan with tokens from `cycle`."""

    def __init__(
        self, step_s: float = 0.0, cycle: tuple[int, ...] = tuple(range(300, 400))
    ) -> None:
        self._step_s = step_s
        self._cycle = cycle
        self._plan: StepPlan | None = None
        self._masks = GrammarMasks()

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self._masks = masks

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None
        if self._step_s:
            time.sleep(self._step_s)
        token = self._cycle[plan.step % len(self._cycle)]
        none = [None]
        samples = [
            Sample(
                row.sequence_id,
                [allowed(token, self._masks.by_sequence.get(row.sequence_id, none)[0])],
            )
            for row in plan.scheduled
            if row.sample
        ]
        done = [transfer.transfer_id for transfer in plan.transfers]
        return StepResult(plan.step, samples, transfers_done=done)

    def describe(self) -> Description:
        return Description(device="null")

    def probe(self, budget_s: float) -> None:
        pass


def allowed(token: int, mask: bytes | None) -> int:
    """Return `token`, or the first allowed token where `mask` forbids it."""
    if mask is None or (token < 8 * len(mask) and mask[token // 8] >> token % 8 & 1):
        return token
    first = next(at for at, byte in enumerate(mask) if byte)
    return first * 8 + (mask[first] & -mask[first]).bit_length() - 1
