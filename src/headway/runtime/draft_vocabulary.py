"""A short vocabulary for drafting, and its rows of the output matrix.

    the first tokens of the vocabulary, 0 … 30,719 │ 2,048 recent ones

The first tokens are those that a BPE merged first, so they are frequent. The others are learned
from prompts and answers: a new token replaces the one that was used longest ago, and its row of the
embedding is packed in that place. A token outside of the list is never drafted; the model samples
it all the same, for draft tokens are verified.

R rows, H hidden size, L tokens of the list, V vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from headway.config.drafter import TOGETHER, num_learned
from headway.runtime.batch import WorkerSequence
from headway.runtime.forward import Forward
from headway.runtime.native.linear import PackedWeight
from headway.runtime.native.lower import lower
from headway.runtime.native.quantized import PackedLevels
from headway.runtime.sampler import NEVER

MAX_ANSWER_TOKENS = 16
"""The last tokens of an answer that are added in each step."""


class TokenList:
    """`size` of `vocab_size` tokens: the first ones, and recently used ones.

    >>> tokens = TokenList(128, 1000)
    >>> tokens.add([7, 900, 64])
    >>> 900 in tokens, 64 in tokens, 65 in tokens, len(tokens.learned)
    (True, True, False, 64)
    """

    def __init__(self, size: int, vocab_size: int) -> None:
        self.num_first, self.vocab_size = size - num_learned(size), vocab_size
        self.learned = list(range(self.num_first, size))
        self.changed: set[int] = set()
        """Places of `learned` that have changed since the last `DraftVocabulary.refresh`."""
        self._recent = {token_id: at for at, token_id in enumerate(self.learned)}
        """Learned token → its place, least recently used first."""

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.num_first or token_id in self._recent

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens that were used; those outside of the learned range are ignored."""
        first, end, lately = self.num_first, self.vocab_size, self._recent
        for token_id in token_ids:
            if first <= token_id < end:
                place = lately.pop(token_id, None)
                if place is None:
                    place = lately.pop(next(iter(lately)))
                    self.learned[place] = token_id
                    self.changed.add(place)
                lately[token_id] = place


class DraftVocabulary:
    """The `TokenList` of a model with an output matrix tied to its embedding, and its packed rows.

    With `normed`, hidden rows have already passed the last norm.
    """

    def __init__(self, forward: Forward, size: int, *, normed: bool = False) -> None:
        self._model, self._kernel = forward.model, forward.kernels.drafter_linear
        self._logits_of = self._model.logits_of if normed else self._model.logits
        self._rows_VH = forward.model.embedding.weight.detach()
        self.tokens = TokenList(size, len(self._rows_VH))
        self._packed = self._kernel.prepare(self._rows_VH[:size].clone())
        self._program = None
        library, hidden = forward.kernels.library, forward.spec.hidden_size
        if library is not None:
            self._program, _ = lower(self._plain_logits, library, forward.dtype, given=hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed rows."""
        return sum(part.nbytes for part in parts_of(self._packed))

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens that were used; they can be drafted from the next `refresh` on."""
        self.tokens.add(token_ids)

    def add_answer(self, sequence: WorkerSequence) -> None:
        """Add the last tokens of the answer of a sequence."""
        self.add(sequence.generated[-MAX_ANSWER_TOKENS:])

    def refresh(self) -> None:
        """Pack the rows of new tokens; called before a proposal."""
        for group in {place // TOGETHER for place in self.tokens.changed}:
            begin = group * TOGETHER
            token_ids = self.tokens.learned[begin : begin + TOGETHER]
            group_parts = parts_of(self._kernel.prepare(self._rows_VH[token_ids]))
            for whole, part in zip(parts_of(self._packed), group_parts, strict=True):
                at = (self.tokens.num_first + begin) // TOGETHER * len(part)
                whole[at : at + len(part)] = part
        self.tokens.changed.clear()

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return `Decoder.logits` of the listed tokens, (R, L); valid until the next call."""
        if self._program is not None:
            return self._program.run_rows(hidden_RH)
        return self._plain_logits(hidden_RH)

    def _plain_logits(self, hidden_RH: Tensor) -> Tensor:
        return self._logits_of(hidden_RH, self.multiply)

    def multiply(self, x_RH: Tensor) -> Tensor:
        """Multiply by the listed rows of the output matrix, (R, L)."""
        return self._kernel(x_RH, self._packed, None)

    def token_ids(self, places: list[int]) -> list[int]:
        """Return the tokens at these places of the list; NO_TOKEN stays."""
        first, learned = self.tokens.num_first, self.tokens.learned
        return [place if place < first else learned[place - first] for place in places]

    def scatter(self, logits_RL: Tensor, vocab_size: int) -> Tensor:
        """Return the logits by token id, (R, V); tokens outside of the list get -inf."""
        logits_RV = logits_RL.new_full((len(logits_RL), vocab_size), NEVER)
        first = self.tokens.num_first
        logits_RV[:, :first] = logits_RL[:, :first]
        logits_RV[:, self.tokens.learned] = logits_RL[:, first:]
        return logits_RV


def parts_of(packed: Tensor | PackedWeight | PackedLevels) -> list[Tensor]:
    """Return the tensors of a prepared weight, each in the order of the outputs."""
    if isinstance(packed, Tensor):
        return [packed]
    return packed.tensors
