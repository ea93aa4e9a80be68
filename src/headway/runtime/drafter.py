"""The interface of drafters in the executor: a draft model, Medusa heads, an EAGLE layer."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.plan import StepPlan
from headway.runtime.batch import Batch, WorkerSequence


class DraftRequest(NamedTuple):
    """A request for up to `max_drafts` draft tokens behind all known tokens of a sequence.

    The last known token was drawn from row `row` of the step's sampled rows.
    """

    sequence: WorkerSequence
    max_drafts: int
    row: int


class Drafter(Protocol):
    """Proposes the next tokens. A wrong draft token costs time and never changes an output."""

    @property
    def name(self) -> str:
        """Name for the log."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        ...

    def apply_plan(self, plan: StepPlan) -> None:
        """Update the drafter by a plan, after `WorkerState.apply` and before the model computes."""
        ...

    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Read the model's states of all tokens of a step, before its tokens are sampled."""
        ...

    def discard_rejected(self, sequence: WorkerSequence) -> None:
        """Drop what was stored for rejected draft tokens, after the tokens of a step are known."""
        ...

    def propose(self, requests: list[DraftRequest], hidden_RH: Tensor) -> dict[int, list[int]]:
        """Return draft tokens by sequence id; `hidden_RH` are the states of the sampled rows."""
        ...
