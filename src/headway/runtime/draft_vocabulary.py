"""The tokens that a drafter guesses among, and their part of its output matrix.

    the first tokens of the vocabulary, 0 … 30,719 │ 2,048 that came lately

The first are those that a BPE merged first, so they are frequent; the others are learned from
prompts and answers: a token that comes takes the place of the one that came longest ago, and its
row of the embedding is packed in place of that one's. A token that is not here is never guessed:
it comes all the same, for guesses are verified.

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
"""Of an answer so many of the last tokens are looked at in each step."""


class TokenList:
    """`size` of `vocab_size` tokens: the first ones, and those that came lately.

    >>> tokens = TokenList(128, 1000)
    >>> tokens.add([7, 900, 64])
    >>> 900 in tokens, 64 in listed, 65 in listed, len(listed.learned)
    (True, True, False, 64)
    """

    def __init__(self, size: int, vocab_size: int) -> None:
        self.num_first, self.vocab_size = size - num_learned(size), vocab_size
        self.learned = list(range(self.num_first, size))
        self.changed: set[int] = set()
        """Which places of `learned` have another token than when somebody last cleared this."""
        self._recent = {token_id: at for at, token_id in enumerate(self.learned)}
        """Learned token → its place, the one that came longest ago first."""

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.num_first or token_id in self._recent

    def add(self, token_ids: Sequence[int]) -> None:
        """These tokens came."""
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
    """`size` tokens of the vocabulary of `forward`, whose output matrix is its embedding.

    `normed`: the rows that are given are as its last norm gives them.
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
        """What its part of the output matrix takes."""
        return sum(part.nbytes for part in parts_of(self._packed))

    def add(self, token_ids: Sequence[int]) -> None:
        """These tokens came: they are guessed from the next `refresh` on."""
        self.tokens.add(token_ids)

    def add_answer(self, sequence: WorkerSequence) -> None:
        """Tokens were sampled: the last that are known."""
        self.add(sequence.generated[-MAX_ANSWER_TOKENS:])

    def refresh(self) -> None:
        """Take up what came, before a proposal."""
        for group in {place // TOGETHER for place in self.tokens.changed}:
            begin = group * TOGETHER
            token_ids = self.tokens.learned[begin : begin + TOGETHER]
            group_parts = parts_of(self._kernel.prepare(self._rows_VH[token_ids]))
            for whole, part in zip(parts_of(self._packed), group_parts, strict=True):
                at = (self.tokens.num_first + begin) // TOGETHER * len(part)
                whole[at : at + len(part)] = part
        self.tokens.changed.clear()

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """`Decoder.logits` of the list's tokens, (R, L); valid until the next call."""
        if self._program is not None:
            return self._program.run_rows(hidden_RH)
        return self._plain_logits(hidden_RH)

    def _plain_logits(self, hidden_RH: Tensor) -> Tensor:
        return self._logits_of(hidden_RH, self.multiply)

    def multiply(self, x_RH: Tensor) -> Tensor:
        """The list's part of the output matrix alone, (R, L)."""
        return self._kernel(x_RH, self._packed, None)

    def token_ids(self, places: list[int]) -> list[int]:
        """The tokens at these places of the list; NO_TOKEN, which is none, stays."""
        first, learned = self.tokens.num_first, self.tokens.learned
        return [place if place < first else learned[place - first] for place in places]

    def scatter(self, logits_RL: Tensor, vocab_size: int) -> Tensor:
        """The same by token id, (R, V); tokens that are not in the list are never drawn."""
        logits_RV = logits_RL.new_full((len(logits_RL), vocab_size), NEVER)
        first = self.tokens.num_first
        logits_RV[:, :first] = logits_RL[:, :first]
        logits_RV[:, self.tokens.learned] = logits_RL[:, first:]
        return logits_RV


def parts_of(packed: Tensor | PackedWeight | PackedLevels) -> list[Tensor]:
    """The tensors of a prepared weight, each in the order of the outputs."""
    if isinstance(packed, Tensor):
        return [packed]
    return packed.tensors
