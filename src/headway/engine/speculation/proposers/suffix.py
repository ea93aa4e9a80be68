"""Suffix proposer: what followed the same tokens in past answers.

It helps repetitive traffic: tool calls, templates, repeated questions. Answers are kept by cache
salt, like blocks of the prefix cache, so an answer to one user is never proposed to another (the
index knows a salt by 64 bits of its hash, which cannot be met without the salt).

All answers are in one ring buffer, each ended by `END`:

    … the sky is blue . END   the story of a fox … END   was here before …
                                                         ↑ the next answer goes here

The newest answer overwrites the oldest. Useful text stays nevertheless: an answer that repeats an
older one is added again, so the oldest is also what was not repeated for longest. Users with many
answers overwrite each other: answers of a salt that holds less than its share are skipped, and
count as new from then on.

The index is like that of `ngram`, but by three tokens of a salt: the latest place, from there the
earlier ones; if three tokens match nothing, the latest place of two. (By pairs alone, 7,000 answers
gave a third of the matches of 8 tokens, because the last 16 places of a frequent pair are all too
recent.) The index may name a place that was overwritten: each candidate is compared token by token,
with its owner, before it counts.
"""

import hashlib
from array import array
from collections import Counter
from functools import lru_cache

from headway.core.plan import Sample
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.ngram import MAX_MATCH
from headway.engine.speculation.proposers.proposal import MIXER, NO_PROPOSAL, Proposal

BYTES_PER_TOKEN = 24
"""Bytes per token: the token, its owner's 8, the place before it, a slot in each of two tables."""
DEFAULT_BYTES = 16 << 20
"""524,288 tokens, because the ring's size is a power of two: two thousand answers of 256."""
CANDIDATES = 16
"""Maximum places compared. After 360 answers of all skills, 4, 16 and 64 gave 4.9, 5.0 and 5.0
tokens a step of stories, 3.7, 3.9 and 3.9 of tool calls; a vote among the longest gave no more."""
PROMPT_TAIL = 16
"""Tokens kept of the prompt's end, so that an answer's first token can be proposed."""
MAX_ANSWER_TOKENS = 4096
"""Tokens kept of an answer, from its beginning: a millisecond when it ends."""
MAX_ENDED = 16
"""Maximum ended answers that wait to be added, in steps without proposals."""
MAX_SKIPPED_TOKENS = 2048
"""Tokens of other owners that one addition may skip, a millisecond or two; beyond that the new
answer is not kept, and the next one continues behind them."""
NO_OWNER = 0
"""Owner of the rest of an answer that was partly overwritten."""
END = -1
MIXER_OF_FIRST = 2654435769
"""Odd number near 2³² / 1.618 that mixes the first of three tokens; `MIXER` mixes the second."""


class PastAnswers:
    """Ended answers of all users, within `max_bytes`."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.size = 1 << max(max_bytes // BYTES_PER_TOKEN, 1).bit_length() - 1
        self._tokens = array("i", [END])
        self._owners = array("q", [0])
        self._previous = array("i", [0])
        self._triples = array("i", bytes(4 * self.size))
        self._pairs = array("i", bytes(4 * self.size))
        self._next = 1
        self._held: Counter[int] = Counter()
        """Owner → tokens of its complete answers."""
        self._authors: dict[int, bytes] = {}
        """Start of a complete answer → its recipient: `Principal.block_owner`."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes held now; at most `BYTES_PER_TOKEN` for each token of the size."""
        return 8 * self.size + (BYTES_PER_TOKEN - 8) * len(self._tokens)

    def add(
        self, salt: str, prompt_tail: list[int], answer: list[int], author: bytes = b""
    ) -> None:
        """Add an answer after the end of its prompt; the oldest ones are overwritten."""
        most = max(min(MAX_ANSWER_TOKENS, self.size - 2), 0)
        tokens = [*prompt_tail[-PROMPT_TAIL:], *answer][:most]
        if len(tokens) < 3 or not answer:
            return
        count, owner = len(tokens) + 1, owner_of(salt)
        begin = self._place(count, owner)
        if begin is None:
            return
        self._next = end = begin + count
        self._overwrite(begin, end)
        self._held[owner] += count
        self._authors[begin] = author
        self._tokens[begin:end] = array("i", [*tokens, END])
        self._owners[begin:end] = array("q", [owner]) * count
        self._previous[begin:end] = array("i", [0]) * count
        self._index(begin, end)

    def _place(self, count: int, owner: int) -> int | None:
        """Return where `count` tokens of `owner` go, after skipping protected answers.

        Answers of owners below their share are protected. None if too many tokens are skipped.
        """
        share = self.size // (2 * (len(self._held) + 1))
        passed = 0
        while passed < MAX_SKIPPED_TOKENS:
            begin = self._next if self._next + count <= self.size else 1
            protected = [
                (at, end)
                for at, end in self._answers(begin, begin + count)
                if self._owners[at] not in (owner, NO_OWNER)
                and self._held[self._owners[at]] <= share
            ]
            if not protected:
                return begin
            for at, end in protected:
                self._index(at, end)
            self._next = protected[-1][1]
            passed += self._next - begin
        return None

    def _answers(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return (begin, end) of the answers that begin before `end`, the first at `begin`."""
        answers, end = [], min(end, len(self._tokens))
        while begin < end:
            close = self._tokens.index(END, begin) + 1
            answers.append((begin, close))
            begin = close
        return answers

    def _overwrite(self, begin: int, end: int) -> None:
        """Remove the answers in this range from their owners, also the one partly in it."""
        for at, close in self._answers(begin, end):
            if self._owners[at] != NO_OWNER:
                self._drop_answer(at, close)

    def _drop_answer(self, begin: int, end: int) -> None:
        """Remove an answer from its owner."""
        owner, count = self._owners[begin], end - begin
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]
        del self._authors[begin]
        self._owners[begin:end] = array("q", [NO_OWNER]) * count

    def forget_owner(self, author: bytes) -> None:
        """Erase the answers of `author` (`Principal.block_owner`), or of names that begin so."""
        for begin in [at for at, who in self._authors.items() if who.startswith(author)]:
            end = self._tokens.index(END, begin) + 1
            self._drop_answer(begin, end)
            self._tokens[begin : end - 1] = array("i", [0]) * (end - 1 - begin)

    def _index(self, begin: int, end: int) -> None:
        """Index the places of an answer as the latest."""
        triples, pairs, mask = self._triples, self._pairs, self.size - 1
        previous, owner = self._previous, self._owners[begin]
        first, before = END, self._tokens[begin]
        for place, token in enumerate(self._tokens[begin + 1 : end - 2], begin + 2):
            pair = before * MIXER + token + owner
            triple = (first * MIXER_OF_FIRST + pair) & mask
            if triples[triple] != place:
                previous[place] = triples[triple]
            triples[triple] = pairs[pair & mask] = place
            first, before = before, token

    def propose(self, salt: str, tokens: list[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow `tokens`: the latest of the longest matches.

        >>> past = PastAnswers()
        >>> past.add("", [1, 2], [3, 4, 5, 6])
        >>> past.propose("", [9, 2, 3], 2), past.propose("other", [9, 2, 3], 2)
        (Proposal(token_ids=[4, 5], match=2), Proposal(token_ids=[], match=0))
        """
        if len(tokens) < 2 or most < 1:
            return NO_PROPOSAL
        owner = owner_of(salt)
        best, source = self._longest(tokens, owner)
        past = self._tokens
        token_ids = past[source : source + most].tolist() if best else []
        if END in token_ids:
            token_ids = token_ids[: token_ids.index(END)]
        return Proposal(token_ids, best)

    def _longest(self, tokens: list[int], owner: int) -> tuple[int, int]:
        """Return (length of the longest match of the last tokens, the place after it); 0: none.

        A longer match than the best so far has the token where that one `differs`, so most places
        are skipped after one comparison.
        """
        token, before, mask = tokens[-1], tokens[-2], self.size - 1
        pair = before * MIXER + token + owner
        best, source = 0, 0
        if len(tokens) > 2:
            longest, past, previous = min(MAX_MATCH, len(tokens)), self._tokens, self._previous
            place, differs = self._triples[(tokens[-3] * MIXER_OF_FIRST + pair) & mask], token
            for _ in range(CANDIDATES):
                if not place:
                    break
                if past[place - 1 - best] == differs and past[place - 1] == token:
                    match = self._match(place, tokens, owner, longest)
                    if match > best:
                        best, source = match, place
                        if best == longest:
                            break
                        differs = tokens[-1 - best]
                place = previous[place]
        if not best:
            source = self._pairs[pair & mask]
            best = self._match(source, tokens, owner, 2)
        return best, source

    def _match(self, place: int, tokens: list[int], owner: int, longest: int) -> int:
        """Return how many of the last tokens precede `place`, from 2 to `longest`.

        0 if fewer, for an answer of another owner, or if nothing follows.
        """
        past = self._tokens
        if past[place - 1] != tokens[-1] or past[place - 2] != tokens[-2]:
            return 0
        if self._owners[place] != owner or past[place] == END:
            return 0
        match = 2
        while match < longest and past[place - 1 - match] == tokens[-1 - match]:
            match += 1
        return match

    def check_integrity(self) -> None:
        """Assert that the ring is within its size and every answer in it has one owner."""
        held = len(self._tokens)
        assert self.size & (self.size - 1) == 0 and 1 <= self._next <= held <= self.size
        assert held == len(self._owners) == len(self._previous)
        assert self._tokens[0] == self._tokens[self._next - 1] == self._tokens[-1] == END
        assert all(0 <= place < held for place in (*self._triples, *self._pairs))
        assert all(0 <= place < held for place in self._previous)
        owned: Counter[int] = Counter()
        whole = set()
        for begin, end in self._answers(1, held):
            owners = set(self._owners[begin:end])
            assert len(owners) == 1, "an answer has two owners"
            owner = owners.pop()
            owned[owner] += end - begin
            if owner != NO_OWNER:
                whole.add(begin)
        del owned[NO_OWNER]
        assert owned == self._held, "an owner's tokens are miscounted"
        assert whole == self._authors.keys(), "an answer has no author, or an author no answer"


class SuffixProposer:
    """Proposes what followed the last tokens in past answers of the same user."""

    name = "suffixes"

    def __init__(self) -> None:
        self.past = PastAnswers()
        self._ended: list[tuple[str, list[int], list[int], bytes]] = []
        """Ended answers not yet added, because adding several at once is cheaper."""

    def add_ended(self) -> None:
        """Add all answers that have ended."""
        ended, self._ended = self._ended, []
        for answer in ended:
            self.past.add(*answer)

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        if self._ended:
            self.add_ended()
        return self.past.propose(sequence.request.principal.cache_salt, sequence.tokens, most)

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        """Queue the answer of an ended sequence: it may be given again."""
        is_answer = sequence.state == FINISHED and not sequence.is_forgotten
        if is_answer and sequence.num_generated:
            begin, principal = sequence.num_prompt, sequence.request.principal
            tail = sequence.tokens[max(0, begin - PROMPT_TAIL) : begin]
            answer = sequence.tokens[begin : begin + MAX_ANSWER_TOKENS]
            self._ended.append((principal.cache_salt, tail, answer, principal.block_owner()))
            if len(self._ended) >= MAX_ENDED:
                self.add_ended()

    def forget_owner(self, owner: bytes) -> None:
        self.add_ended()
        self.past.forget_owner(owner)


@lru_cache(maxsize=4096)
def owner_of(salt: str) -> int:
    """Return a signed 64-bit hash of a salt."""
    hashed = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "little", signed=True)
