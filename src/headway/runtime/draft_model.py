"""A second, smaller model that guesses what the first will say (Leviathan et al. 2023).

Its layers ride in the model's blocks (`riding`), one or several groups of its own on one of the
model's. What it computes depends on tokens alone, so what it computed for a guess that was right
stays.
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from headway.config.resolve import Settings
from headway.runtime.batch import Batch, WorkerState
from headway.runtime.checkpoint import Progress
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.runtime.forward import Forward
from headway.runtime.kernels import Kernels
from headway.runtime.riding import RidingDrafter
from headway.runtime.shared_weights import SharedWeights
from headway.spec import ModelSpec


class DraftModel(RidingDrafter):
    """The model of `folder` drafts; a `drafter.Drafter`."""

    name = "the draft model"

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        kernels: Kernels,
        state: WorkerState,
        vocab_size: int,
        progress: Progress | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        num_blocks = settings.cache.num_blocks[settings.speculation.draft_group]
        of_groups = (num_blocks,) * len(spec.kv_groups)
        cache = settings.cache
        if cache.open_blocks:  # the model's are rounded when they are full, the drafter's stay
            cache = replace(cache, open_blocks=False, dtype=settings.dtype)
        own = replace(settings, cache=cache)
        self.forward = Forward(folder, spec, own, kernels, of_groups, progress, shared=shared)
        size = settings.speculation.draft_vocab_size
        vocabulary = DraftVocabulary(self.forward, size) if size else None
        super().__init__(self.forward, vocabulary, settings, state, spec.max_len, vocab_size)

    def first(self, batch: Batch) -> Tensor:
        """Known tokens, in one pass."""
        return self._written(self.forward(batch), batch)

    def further(self, batch: Batch, hidden_RH: Tensor) -> Tensor:
        """A guess of each sequence: a token as any other."""
        return self.first(batch)

    def keep(self, batch: Batch, hidden_TH: Tensor) -> None:
        """The model's states are of no use: it computes its own."""
