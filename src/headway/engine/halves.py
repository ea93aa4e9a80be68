"""A step that raised, tried again in halves: only a row that raises alone is at fault.

    step 41 raises     [a b c d e f]
    [a b c]            runs: a, b and c have their tokens
    [d e f]            raises: [d e] runs, [f] raises alone, and fails

Nobody knows how much of a failed plan the runtime had applied, so each row it tries again is
introduced anew, with its whole block table. The KV before `start` is in place from earlier steps,
the rest is written once more: a token depends on what a sequence knows, not on who ran beside it,
so those that are not at fault get the tokens they would have had.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headway.core.plan import Advance, NewSequence, StepPlan, StepResult
from headway.engine.sequence import Sequence


def new_sequence(sequence: Sequence) -> NewSequence:
    """What the runtime is told of a sequence it does not know."""
    sampling = sequence.request.sampling
    return NewSequence(
        sequence.sequence_id,
        sequence.index,
        list(sequence.tokens),
        sequence.num_prompt,
        sampling,
        sequence.seed,
        sorted(sequence.stop_ids) if sampling.min_tokens else [],
        sequence.request.adapter,
    )


@dataclass(slots=True, kw_only=True)
class Halves:
    """The search for the rows at fault; `result` is what the others gained, and who failed."""

    run: Callable[[StepPlan], StepResult]
    next_step: Callable[[], int]
    find: Callable[[int], Sequence | None]
    result: StepResult
    stale: list[int] = field(default_factory=list)
    """Sequences that the runtime may or may not know: it forgets them with the next attempt."""
    num_attempts: int = 0

    def search(self, rows: list[Advance]) -> None:
        """Try `rows`, which raised together, in halves; a single row is tried once more."""
        middle = (len(rows) + 1) // 2
        for half in (rows[:middle], rows[middle:]):
            if not half:
                continue
            error = self._attempt(half)
            if error is None:
                continue
            if len(half) > 1:
                self.search(half)
            else:
                self.result.failed[half[0].sequence_id] = f"{type(error).__name__}: {error}"

    def _attempt(self, rows: list[Advance]) -> Exception | None:
        """Run `rows` as a step of their own and take the result, or say what it raised."""
        plan = StepPlan(self.next_step(), [], [], self.stale)
        for row in rows:
            sequence = self.find(row.sequence_id)
            assert sequence is not None
            tables = [list(table) for table in sequence.block_tables]
            plan.new.append(new_sequence(sequence))
            plan.advanced.append(msgspec.structs.replace(row, new_blocks=tables))
        self.stale = [row.sequence_id for row in rows]
        self.num_attempts += 1
        try:
            part = self.run(plan)
        except Exception as error:
            return error
        self.stale = []
        self.result.samples += part.samples
        self.result.prompt_logprobs += part.prompt_logprobs
        self.result.failed |= part.failed
        return None
