"""What the executor asks of whoever guesses behind its draw: a draft model, heads, a layer."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.plan import StepPlan
from headway.runtime.batch import Batch, WorkerSequence


class DraftRequest(NamedTuple):
    """Up to `max_drafts` guesses of what follows all known tokens of a sequence.

    The last of them was drawn behind row `row` of the step's sampled rows.
    """

    sequence: WorkerSequence
    max_drafts: int
    row: int


class Drafter(Protocol):
    """Guesses what comes next. What is wrong in it costs time and never changes a token."""

    @property
    def name(self) -> str:
        """What it is, for the log."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What its weights take."""
        ...

    @property
    def kv_bytes(self) -> int:
        """What its keys and values take."""
        ...

    def apply_plan(self, plan: StepPlan) -> None:
        """Note what becomes of blocks, after the state has; before the model computes."""
        ...

    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """The model has computed `batch`: its states of all tokens, before anything is sampled."""
        ...

    def discard_rejected(self, sequence: WorkerSequence) -> None:
        """Some guesses of `sequence` were verified: what was kept for wrong ones is of no use."""
        ...

    def propose(self, requests: list[DraftRequest], hidden_RH: Tensor) -> dict[int, list[int]]:
        """Guesses by sequence id; `hidden_RH` are the model's states of the sampled rows."""
        ...
