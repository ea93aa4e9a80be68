"""What the model said ahead of time: lookahead decoding (Fu et al. 2024).

Behind each guess the step samples what the model says there, right or wrong. What it says behind a
wrong guess is thrown away as text, and kept here: it is what this model says behind such tokens.

    known  … t8 t9    guesses   a  b  c  d        a step computes t9 a b c d
    sampled           a  x  y  z  w               tokens: a x    behind b c d: y z w
    kept for later    (a b → y) (b c → z) (c d → w), and behind one token (b → y) (c → z) (d → w)
    the next window   y z w                       they stand where the next tokens will (Jacobi)

So each guess that is verified looks for n-grams as well: rows that verify nothing likely are the
window. What is guessed next is put together token by token, each by what followed the last two
tokens or the last one: in this sequence, as the model said or as it stands in the prompt; then in
other sequences of the same user. Where nothing is known the window goes on with itself, and beyond
it with tokens of the prompt, for they come again sooner than others.

Each guess has a kind, how it was found, and `Acceptance` learns the share kept by kind. On chats of
headway-tiny, of the guesses that were reached:

    prompt tokens  window | own: text  said  behind two: text  said | user's: text  said  two: …
        0.03        0.22  |      0.25  0.60              0.57  0.74 |        0.4   0.35  0.72  0.66

Guessed behind two tokens or one, 4 rows gave 1.68 tokens a step, one token alone 1.58, up to three
1.68; without what others of the user said 1.68, with it 1.94; Jacobi's window alone 1.16.
"""

from array import array

from headway.core.plan import Sample
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.proposal import MIXER, NO_PROPOSAL, Proposal
from headway.engine.speculation.proposers.suffix import MIXER_OF_FIRST, owner_of

SIZE = 1 << 19
"""Entries of the pool, a power of two."""
BYTES_PER_ENTRY = 12
ANY = -1
"""In place of the first of two tokens: behind one token alone."""
MIXER_OF_SEQUENCE = 0x9E3779B97F4A7C15
POSITIVE = (1 << 63) - 1
INTAKE = 512
"""Tokens taken in at once, half a millisecond."""
SEED = 4096
"""Of a long prompt so many of its last tokens are taken in."""

FILL, WINDOW, POOL_MATCH = 0, 1, 2
"""Kinds of a guess; found in the pool it is 2 + 4 where another sequence of the user left it, + 2
behind two tokens, + 1 where the model said it behind a wrong guess. So what it said is odd."""
KINDS = tuple(range(10))
SLACK = 0.5
"""Guesses of so much of the least chance that pays are looked for: of this request more may be kept
than of others."""
MARGIN = 0.5
"""A guess that is kept and was said ahead counts so much: its own row had a price, and something
else might have been guessed. In chats whose rows make a step 3, 5, 10 and 15% longer each, 0 gave
1.80, 1.70, 1.48 and 1.34 times the tokens a second, 0.5 1.87, 1.72, 1.48 and 1.35, 1.5 1.87, 1.73,
1.46 and 1.31."""
FADE = 0.99
PRIOR_ACCEPTED, PRIOR_SAMPLED = 0.6, 4.0


class NGramPool:
    """What followed one token or two, by owner: `size` entries, of which the newest stays."""

    def __init__(self, size: int = SIZE) -> None:
        assert size & (size - 1) == 0
        self.size, self._mask = size, size - 1
        self._keys = array("q", [0]) * size
        self._entries = array("i", [0]) * size

    @property
    def num_bytes(self) -> int:
        """What it holds, always."""
        return BYTES_PER_ENTRY * len(self._keys)

    def add(self, owner: int, before: int, token: int, following: int, is_sampled: bool) -> None:
        """Add `following`, which came behind these two tokens; `is_sampled` says that the model
        sampled it behind a draft token that was rejected.

        What is known already stays as it was: only what the model says anew is its merit.
        """
        for first in (ANY, before) if before != ANY else (ANY,):
            key = (owner + token * MIXER_OF_FIRST + first * MIXER) & POSITIVE
            slot = key & self._mask
            if self._keys[slot] != key or self._entries[slot] >> 1 != following:
                self._keys[slot], self._entries[slot] = key, 2 * following + is_sampled

    def best(self, own: int, user: int, before: int, token: int) -> tuple[int, int]:
        """(kind, what followed): behind two tokens before one, the sequence's own before the
        user's; of kind `FILL` where nothing is known.

        >>> pool = NGramPool(1024)
        >>> pool.add(7, 1, 2, 3, is_sampled=True)
        >>> pool.best(7, 0, 1, 2), pool.best(0, 7, 9, 2), pool.best(8, 9, 1, 2)
        ((5, 3), (7, 3), (0, 0))
        """
        keys, mask, one = self._keys, self._mask, token * MIXER_OF_FIRST
        two = one + before * MIXER
        one -= MIXER
        key, kind = (own + two) & POSITIVE, POOL_MATCH + 2
        if keys[key & mask] != key:
            key, kind = (user + two) & POSITIVE, POOL_MATCH + 6
            if keys[key & mask] != key:
                key, kind = (own + one) & POSITIVE, POOL_MATCH
                if keys[key & mask] != key:
                    key, kind = (user + one) & POSITIVE, POOL_MATCH + 4
                    if keys[key & mask] != key:
                        return FILL, 0
        entry = self._entries[key & mask]
        return kind + (entry & 1), entry >> 1


class LookaheadWindow:
    """What is kept of one sequence."""

    __slots__ = ("_sampled", "_sampled_at", "author", "kinds", "num_indexed", "owner", "user")

    def __init__(self, sequence: Sequence) -> None:
        self.owner = (sequence.sequence_id + 1) * MIXER_OF_SEQUENCE
        principal = sequence.request.principal
        self.author = principal.block_owner()
        self.user = self.owner if sequence.is_forgotten else owner_of(principal.cache_salt)
        self.num_indexed = max(len(sequence.tokens) - SEED, 1)
        """How many tokens the pool knows of it."""
        self._sampled, self._sampled_at = list[int](), 0
        self.kinds: tuple[int, ...] = ()
        """Of the last proposal."""

    def keep(self, sampled: list[int], position: int) -> None:
        """Keep what the model said where the tokens from `position` on will stand."""
        self._sampled, self._sampled_at = sampled, position

    def sampled_from(self, position: int) -> list[int]:
        """What the model said where the tokens from `position` on stand."""
        return self._sampled[position - self._sampled_at :]


class Lookahead:
    """The source; `expected_tokens` is what a row brings beside the token that it verifies."""

    name = "lookahead"

    def __init__(self, size: int = SIZE) -> None:
        self.pool = NGramPool(size)
        self._shares, self._least = [1.0] * len(KINDS), 0.0
        self._by_id: dict[int, LookaheadWindow] = {}
        self._num_accepted = self._num_sampled = 0.0

    @property
    def expected_tokens(self) -> float:
        """Tokens that what is said behind a wrong guess will bring."""
        return MARGIN * (self._num_accepted + PRIOR_ACCEPTED) / (self._num_sampled + PRIOR_SAMPLED)

    def begin(self, shares: list[float], least: float) -> None:
        """A step in which rows that are worth less than `least` do not pay; of guesses that are
        reached these `shares` are kept, by kind."""
        self._shares, self._least = shares, SLACK * (least - self.expected_tokens)

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """What is known of the next `most` tokens, and the window where it is not, as far as rows
        may pay."""
        tokens = sequence.tokens
        window = self._by_id.get(sequence.sequence_id)
        if window is None:
            window = self._by_id[sequence.sequence_id] = LookaheadWindow(sequence)
        self._take_in(window, sequence)
        if most < 1:
            return NO_PROPOSAL
        guesses, kinds, chance = [], [], 1.0
        before, token = tokens[-2] if len(tokens) > 1 else ANY, tokens[-1]
        sampled = window.sampled_from(len(tokens))
        for at in range(most):
            kind, following = self.pool.best(window.owner, window.user, before, token)
            if kind == FILL:
                if chance * self._shares[WINDOW] < self._least:
                    break
                if at < len(sampled):
                    kind, following = WINDOW, sampled[at]
                else:
                    following = tokens[(len(tokens) + at) * MIXER % sequence.num_prompt]
            before, token = token, following
            guesses.append(token)
            kinds.append(kind)
            chance *= self._shares[kind]
            if chance < self._least:
                break
        window.kinds = tuple(kinds)
        return Proposal(guesses, window.kinds) if guesses else NO_PROPOSAL

    def _take_in(self, window: LookaheadWindow, sequence: Sequence) -> None:
        """Add what is known of it by now; of its prompt to its own n-grams alone."""
        tokens, begin = sequence.tokens, window.num_indexed
        window.num_indexed = end = min(len(tokens), begin + INTAKE)
        add = self.pool.add
        for at in range(begin, end):
            before = tokens[at - 2] if at > 1 else ANY
            add(window.owner, before, tokens[at - 1], tokens[at], False)
            if at >= sequence.num_prompt:
                add(window.user, before, tokens[at - 1], tokens[at], False)

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Keep what was sampled behind rejected draft tokens, of any proposer."""
        window = self._by_id.get(sequence.sequence_id)
        if window is None:
            return
        num_accepted, num_forced = len(sample.token_ids) - 1, sequence.num_forced
        if not drafts.token_ids:
            return
        window.keep(sample.behind[num_forced:], len(sequence.tokens))
        # forced tokens came where the first of these stood
        kinds = window.kinds[:num_accepted] if drafts.source == self.name else ()
        self._num_accepted = FADE * self._num_accepted + sum([kind & 1 for kind in kinds])
        self._num_sampled = FADE * self._num_sampled + len(sample.behind)
        guessed = drafts.token_ids[num_accepted:]
        before = (
            drafts.token_ids[num_accepted - 1] if num_accepted else sequence.tokens[-2 - num_forced]
        )
        for token, following in zip(guessed, sample.behind):
            self.pool.add(window.owner, before, token, following, True)
            self.pool.add(window.user, before, token, following, True)
            before = token

    def forget(self, sequence: Sequence) -> None:
        """Its n-grams are overwritten in time."""
        self._by_id.pop(sequence.sequence_id, None)

    def forget_owner(self, owner: bytes) -> None:
        """N-grams do not tell whose they are, so everybody's go; who runs on and is forgotten
        leaves none to others from now on."""
        self.pool = NGramPool(self.pool.size)
        for window in self._by_id.values():
            if window.author.startswith(owner):
                window.user = window.owner
