"""Lookahead decoding: n-grams that the model samples behind draft tokens (Fu et al. 2024).

Behind each draft token the step samples what the model says there, whether the token is accepted or
not. What it samples behind a rejected token is useless as text, but it is kept here as an n-gram:
it is what this model says behind these tokens.

    known  … t8 t9    drafts    a  b  c  d        a step computes t9 a b c d
    sampled           a  x  y  z  w               tokens: a x    behind b c d: y z w
    kept for later    (a b → y) (b c → z) (c d → w), and behind one token (b → y) (c → z) (d → w)
    the next window   y z w                       at the positions of the next tokens (Jacobi)

So each verified draft token also searches for n-grams: draft tokens that are unlikely to be
accepted are the window. A proposal is built token by token, each by what followed the last two
tokens or the last one: in this sequence, as sampled or as in its text; then in other sequences of
the same user. Without an n-gram the window continues with itself, and beyond it with tokens of the
prompt, because they come again sooner than others.

Each draft token has a kind, how it was found, and `Acceptance` learns the acceptance rate by kind.
On chats of headway-tiny, of the draft tokens that were reached:

    prompt tokens  window | own: text  sampled  behind two: text  sampled | user's: the same four
        0.03        0.22  |      0.25  0.60                 0.57  0.74    |      0.4  0.35 0.72 0.66

N-grams behind two tokens or one gave 1.68 tokens a step with 4 rows, behind one token only 1.58,
behind up to three 1.68; without n-grams of the user's other sequences 1.68, with them 1.94; the
Jacobi window alone 1.16.
"""

from array import array

from headway.core.plan import Sample
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.proposal import MIXER, NO_PROPOSAL, Proposal
from headway.engine.speculation.proposers.suffix import MIXER_OF_FIRST, owner_of

POOL_ENTRIES = 1 << 19
"""Entries of the pool, a power of two."""
BYTES_PER_ENTRY = 12
NO_TOKEN = -1
"""Placeholder for the first of two tokens: the n-gram has only one token."""
MIXER_OF_SEQUENCE = 0x9E3779B97F4A7C15
POSITIVE = (1 << 63) - 1
MAX_NEW_TOKENS = 512
"""Maximum tokens taken into the pool per step, half a millisecond."""
PROMPT_TOKENS = 4096
"""Number of last tokens of a long prompt that are taken into the pool."""

FILL, WINDOW, POOL_MATCH = 0, 1, 2
"""Kinds of a draft token. From the pool: 2, + 4 of another sequence of the user, + 2 behind two
tokens, + 1 if sampled behind a rejected draft token, so kinds of sampled n-grams are odd."""
KINDS = tuple(range(10))
LEAST_PROBABILITY_SHARE = 0.5
"""Share of the least probability that pays, above which draft tokens are searched for: a sequence
may have a higher acceptance rate than others."""
NGRAM_VALUE = 0.5
"""Value of an accepted draft token from a sampled n-gram: below 1, because its own row had a cost,
and something else might have been proposed. In chats whose rows make a step 3, 5, 10 and 15%
longer each, 0 gave 1.80, 1.70, 1.48 and 1.34 times the tokens a second, 0.5 1.87, 1.72, 1.48 and
1.35, 1.5 1.87, 1.73, 1.46 and 1.31."""
DECAY = 0.99
PRIOR_ACCEPTED, PRIOR_SAMPLED = 0.6, 4.0


class NGramPool:
    """N-grams of two or three tokens, by owner: `size` entries, of which the newest stays."""

    def __init__(self, size: int = POOL_ENTRIES) -> None:
        assert size & (size - 1) == 0
        self.size, self._mask = size, size - 1
        self._keys = array("q", [0]) * size
        self._entries = array("i", [0]) * size

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pool, which are constant."""
        return BYTES_PER_ENTRY * len(self._keys)

    def add(self, owner: int, before: int, token: int, following: int, is_sampled: bool) -> None:
        """Add `following`, which came behind these two tokens.

        `is_sampled` says that the model sampled it behind a rejected draft token. An entry that is
        already known keeps its origin, so that sampling gets credit only for new n-grams.
        """
        for first in (NO_TOKEN, before) if before != NO_TOKEN else (NO_TOKEN,):
            key = (owner + token * MIXER_OF_FIRST + first * MIXER) & POSITIVE
            slot = key & self._mask
            if self._keys[slot] != key or self._entries[slot] >> 1 != following:
                self._keys[slot], self._entries[slot] = key, 2 * following + is_sampled

    def best(self, own: int, user: int, before: int, token: int) -> tuple[int, int]:
        """Return (kind, following token): two tokens before one, the sequence's own before the
        user's; kind `FILL` if nothing is known.

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
    """State of one sequence: its owners, the indexed tokens, and the window."""

    __slots__ = ("_sampled", "_sampled_at", "author", "kinds", "num_indexed", "owner", "user")

    def __init__(self, sequence: Sequence) -> None:
        self.owner = (sequence.sequence_id + 1) * MIXER_OF_SEQUENCE
        principal = sequence.request.principal
        self.author = principal.block_owner()
        self.user = self.owner if sequence.is_forgotten else owner_of(principal.cache_salt)
        self.num_indexed = max(len(sequence.tokens) - PROMPT_TOKENS, 1)
        """Number of its tokens that the pool has."""
        self._sampled, self._sampled_at = list[int](), 0
        self.kinds: tuple[int, ...] = ()
        """Kinds of the last proposal."""

    def keep(self, sampled: list[int], position: int) -> None:
        """Keep the tokens sampled for the positions from `position` on."""
        self._sampled, self._sampled_at = sampled, position

    def sampled_from(self, position: int) -> list[int]:
        """Return the tokens sampled for the positions from `position` on."""
        return self._sampled[position - self._sampled_at :]


class Lookahead:
    """Lookahead proposer; `expected_tokens` is a row's value beyond the token that it verifies."""

    name = "lookahead"

    def __init__(self, size: int = POOL_ENTRIES) -> None:
        self.pool = NGramPool(size)
        self._shares, self._least = [1.0] * len(KINDS), 0.0
        self._by_id: dict[int, LookaheadWindow] = {}
        self._num_accepted = self._num_sampled = 0.0

    @property
    def expected_tokens(self) -> float:
        """Return the tokens that an n-gram sampled behind a rejected token is expected to bring."""
        return (
            NGRAM_VALUE
            * (self._num_accepted + PRIOR_ACCEPTED)
            / (self._num_sampled + PRIOR_SAMPLED)
        )

    def begin(self, shares: list[float], least: float) -> None:
        """Begin a step in which draft tokens worth less than `least` do not pay.

        `shares` are the acceptance rates of draft tokens that are reached, by kind.
        """
        self._shares, self._least = shares, LEAST_PROBABILITY_SHARE * (least - self.expected_tokens)

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return up to `most` next tokens, by n-grams or by the window, while rows may pay."""
        tokens = sequence.tokens
        window = self._by_id.get(sequence.sequence_id)
        if window is None:
            window = self._by_id[sequence.sequence_id] = LookaheadWindow(sequence)
        self._index_new_tokens(window, sequence)
        if most < 1:
            return NO_PROPOSAL
        token_ids, kinds, chance = [], [], 1.0
        before, token = tokens[-2] if len(tokens) > 1 else NO_TOKEN, tokens[-1]
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
            token_ids.append(token)
            kinds.append(kind)
            chance *= self._shares[kind]
            if chance < self._least:
                break
        window.kinds = tuple(kinds)
        return Proposal(token_ids, window.kinds) if token_ids else NO_PROPOSAL

    def _index_new_tokens(self, window: LookaheadWindow, sequence: Sequence) -> None:
        """Add new tokens of the sequence to the pool; its prompt only to its own n-grams."""
        tokens, begin = sequence.tokens, window.num_indexed
        window.num_indexed = end = min(len(tokens), begin + MAX_NEW_TOKENS)
        add = self.pool.add
        for at in range(begin, end):
            before = tokens[at - 2] if at > 1 else NO_TOKEN
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
        # forced tokens took the first of these positions
        kinds = window.kinds[:num_accepted] if drafts.source == self.name else ()
        self._num_accepted = DECAY * self._num_accepted + sum([kind & 1 for kind in kinds])
        self._num_sampled = DECAY * self._num_sampled + len(sample.behind)
        rejected = drafts.token_ids[num_accepted:]
        before = (
            drafts.token_ids[num_accepted - 1] if num_accepted else sequence.tokens[-2 - num_forced]
        )
        for token, following in zip(rejected, sample.behind):
            self.pool.add(window.owner, before, token, following, True)
            self.pool.add(window.user, before, token, following, True)
            before = token

    def forget(self, sequence: Sequence) -> None:
        """Drop the window; the n-grams are overwritten in time."""
        self._by_id.pop(sequence.sequence_id, None)

    def forget_owner(self, owner: bytes) -> None:
        """Drop all n-grams, because they do not name their owner.

        Running sequences of `owner` leave no n-grams to others from now on.
        """
        self.pool = NGramPool(self.pool.size)
        for window in self._by_id.values():
            if window.author.startswith(owner):
                window.user = window.owner
