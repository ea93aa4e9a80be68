"""A sequence: its known tokens, and how many of them are computed.

    known     t0 t1 t2 t3 t4 t5        prompt, then what was sampled
    computed  ────────────►            KV in place for t0 … t3
    next step         t4 t5            `computed` catches up with the known tokens

A prompt chunk, a decode step, a fork and a resumed sequence differ only in these two numbers.

Where a grammar leaves one token it need not be sampled: it is known at once, and the step that
computes the sampled token computes it too (jump forward).

    known     t0 … t4 {                { was sampled
    forced            { " n a m e      five tokens are known behind it, and nothing was computed
    next step         { " n a m e      one row of 6 tokens, of which the last is sampled from
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headway.core.plan import NewSequence, Sample
from headway.core.request import Request, SequenceUpdate, TokenLogprobs
from headway.engine.chain import Chain, root_key
from headway.engine.grammar.state import GrammarState

if TYPE_CHECKING:
    from headway.engine.kv.prefix import Tier

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
WAITING_FOR_KV = "waiting for KV"
"""It has a row and blocks; its KV is being copied into them."""
MOST_FORCED = 16
"""Upper bound of forced tokens in one step, which then stays about as short as a decode step."""


class Sequence:
    """State of one of the `n` sequences of a request."""

    __slots__ = (
        "arrived_s",
        "block_tables",
        "chain",
        "computed",
        "dropped",
        "first_live",
        "first_scheduled_s",
        "first_token_s",
        "forks",
        "grammar",
        "host_tables",
        "index",
        "is_forgotten",
        "known_to_runtime",
        "kv_keep",
        "kv_read",
        "max_len",
        "num_cached",
        "num_exported",
        "num_forced",
        "num_given",
        "num_lost",
        "num_prompt",
        "num_remembered",
        "num_shared",
        "parcel_id",
        "parts_at",
        "policy_state",
        "prompt_logprobs",
        "request",
        "request_id",
        "restored",
        "room",
        "scaled_len",
        "seed",
        "sequence_id",
        "shares_blocks",
        "source",
        "state",
        "stop_ids",
        "takes_hits",
        "takes_restores",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        *,
        num_groups: int,
        stop_ids: frozenset[int],
        max_len: int,
        seed: int,
        kv_read: float = 1.0,
        kv_keep: float = 1.0,
        scaled_len: int | None = None,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.computed = 0
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.host_tables: list[list[int]] = []
        """By group: the host blocks of its computed tokens while it is swapped out."""
        self.first_live = [0] * num_groups
        """By group: how many entries of the table were released, out of the window."""
        self.shares_blocks = False
        self.room = 0
        """Tokens that its blocks hold, so that `KVCache.extend` need not be called; 0: unknown."""
        self.chain: Chain | None = None
        """The keys of its full blocks, where there is a prefix cache."""
        self.num_remembered = 0
        """How many of its blocks are listed in the prefix cache."""
        self.num_shared = 0
        """Tokens at its beginning whose blocks other sequences held when it started."""
        self.num_forced = 0
        """How many of its last tokens a grammar forced and the runtime does not know yet."""
        self.state = WAITING
        self.known_to_runtime = False
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.seed = seed
        self.scaled_len = scaled_len
        """The length that its RoPE is scaled for; 0: not scaled; None: scaling is not by length."""
        self.forks: list[Sequence] = []
        """Sequences of the same request that start when this one's prompt is computed."""
        self.wants_prompt_logprobs = index == 0 and request.sampling.prompt_logprobs is not None
        self.takes_hits = not self.wants_prompt_logprobs
        """Whether it may start behind a prefix from the cache."""
        self.kv_read = kv_read
        """Share of the context that a token reads, from token `reads_from` on."""
        self.kv_keep = kv_keep
        """Share of the first `chooses_at` tokens whose KV is kept for later tokens."""
        self.dropped = [0] * num_groups
        """By group: how many blocks shorter the table is than its tokens: their KV was dropped."""
        self.takes_restores = True
        """Whether it may start behind KV of a lower tier; not after a restore failed."""
        self.restored: dict[str, int] = {}
        """Tokens restored from lower tiers, by tier."""
        self.source: Tier | None = None
        """Another engine that has computed its prefix."""
        self.parcel_id = b""
        """The name of its full blocks for another engine that is to continue it."""
        self.num_exported = 0
        """Blocks from the beginning that were exported to that engine."""
        self.parts_at = -1
        """The block after which its prompt differs from other prompts; -1: unknown."""
        self.is_forgotten = False
        """Whether its owner was forgotten or it failed: its blocks are not listed."""
        self.grammar: GrammarState | None = None
        """The state of its grammar, if it has one."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.first_scheduled_s: float | None = None
        self.num_cached = 0
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        self.num_lost = 0
        """Tokens that were computed when it was preempted, until it resumes."""
        self.num_given = 0
        """How often its slot was reclaimed for a user below its share."""
        self.arrived_s = request.arrived_s
        self.first_token_s: float | None = None
        self.policy_state: Any = None
        """State of the scheduling policy; only the policy reads and writes it."""

    def resume(self, generated: list[int]) -> None:
        """Continue behind tokens that another engine has generated."""
        self.tokens += generated
        self.wants_prompt_logprobs = self.wants_prompt_logprobs and not generated

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.state}, prompt {self.num_prompt}, "
            f"known {len(self.tokens)}, computed {self.computed})"
        )

    def keys(self, block_size: int) -> Chain:
        """Return the keys of its full blocks, each computed on first use."""
        if self.chain is None:
            self.chain = Chain(self.tokens, self.root, block_size)
        return self.chain

    @property
    def root(self) -> bytes:
        """The root key of its chain."""
        request = self.request
        return root_key(request.principal.cache_salt, request.adapter, self.scaled_len)

    @property
    def reads_from(self) -> int:
        """The first token that reads a share of its context: generated, or scored as such."""
        scored = self.request.sampling.prompt_logprobs is not None
        return 0 if scored else self.num_prompt

    @property
    def chooses_at(self) -> int:
        """The number of tokens of whose KV a share is kept: its prompt.

        Of a prompt that is scored it is half, so that the other half shows the loss.
        """
        scored = self.request.sampling.prompt_logprobs is not None
        return self.num_prompt // 2 if scored else self.num_prompt

    @property
    def num_exact(self) -> int:
        """How many of its tokens have the KV that any other request with this prefix has.

        Later ones, which see a share of their context, must not be found by others.
        """
        if self.kv_keep < 1:
            return self.chooses_at
        return len(self.tokens) if self.kv_read >= 1 else self.reads_from

    @property
    def max_cached(self) -> int:
        """Upper bound of tokens that it may take from the prefix cache: not the last one."""
        return min(len(self.tokens) - 1, self.num_exact)

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Number of known tokens that are not computed."""
        return len(self.tokens) - self.computed

    def num_news(self, begin: int, end: int) -> int:
        """Return how many of its tokens `begin` … `end` - 1 the runtime does not know."""
        return end - max(begin, len(self.tokens) - self.num_forced) if self.num_forced else 0

    @property
    def may_jump(self) -> bool:
        """Whether forced tokens need no logits: log-probabilities would need those of the model."""
        return self.grammar is not None and self.request.sampling.logprobs is None

    def append(self, token_id: int) -> str | None:
        """Append a token; return why the sequence ends with it, or None when it goes on.

        `error` is a token that the grammar does not allow, which is not appended: a mask of too
        many steps, or an executor without masks.
        """
        if self.grammar is not None and not self.grammar.accept(token_id):
            return "error"
        tokens = self.tokens
        tokens.append(token_id)
        if token_id in self.stop_ids and self.num_generated > self.request.sampling.min_tokens:
            return "stop"
        if self.grammar is not None and self.grammar.is_complete:
            return "stop"
        return "length" if len(tokens) >= self.max_len else None

    def take(self, sample: Sample, now_s: float, jumps: bool = False) -> SequenceUpdate:
        """Append sampled tokens up to the first that ends the sequence; return the update.

        With `jumps` the tokens that its grammar forces after these are appended too.
        """
        token_ids: list[int] = []
        update = SequenceUpdate(self.request_id, self.index, token_ids)
        if sample.logprobs is not None:
            update.logprobs = sample.logprobs
        if self.first_token_s is None:
            self.first_token_s = now_s
        if len(self.tokens) == self.num_prompt:
            update.first_scheduled_s = self.first_scheduled_s
            update.num_cached_tokens = self.num_cached
            if self.wants_prompt_logprobs:
                update.prompt_logprobs = self.prompt_logprobs
        self.num_forced = 0
        jumps = jumps and self.may_jump
        for token_id in self._following(sample.token_ids) if jumps else sample.token_ids:
            reason = self.append(token_id)
            token_ids.append(token_id)
            if reason is not None:
                update.logprobs = sample.logprobs[: len(token_ids)] if sample.logprobs else None
                update.finish_reason = reason
                hidden = reason == "stop" and self.hides(token_id)
                update.stop_token_id = token_id if hidden else None
                if self.grammar is not None:
                    update.incomplete = not self.grammar.is_satisfied
                break
        if self.num_forced:
            update.num_forced = self.num_forced
        return update

    def _following(self, sampled: list[int]) -> Iterator[int]:
        """Yield the tokens `sampled`, then each forced one once those before it are appended."""
        yield from sampled
        assert self.grammar is not None
        while self.num_forced < MOST_FORCED:
            token_id = self.grammar.only_token()
            if token_id is None:
                return
            self.num_forced += 1
            yield token_id

    def keep_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Append the new entries; those of a preempted prompt are computed twice, reported once."""
        self.prompt_logprobs += entries[max(len(self.prompt_logprobs) - start, 0) :]

    def hides(self, token_id: int) -> bool:
        """Return whether `token_id`, which ended the sequence, is a stop token and not text."""
        return token_id in self.stop_ids or (self.grammar is not None and self.grammar.ended)

    def introduction(self) -> NewSequence:
        """Return what introduces it to the runtime: all tokens, forced ones included."""
        sampling = self.request.sampling
        self.num_forced = 0
        return NewSequence(
            self.sequence_id,
            self.index,
            list(self.tokens),
            self.num_prompt,
            sampling,
            self.seed,
            sorted(self.stop_ids) if sampling.min_tokens else [],
            self.request.adapter,
            self.kv_read,
            self.reads_from,
            list(self.dropped) if any(self.dropped) else [],
            self.scaled_len or 0,
        )

    def check_integrity(self) -> None:
        """Assert what holds for a sequence between steps."""
        assert 0 <= self.computed <= len(self.tokens), self
        assert 0 <= self.num_forced <= min(self.num_generated, MOST_FORCED), self
        if self.grammar is not None and not self.grammar.is_released:
            assert self.grammar.num_accepted == self.num_generated, self
        assert self.num_prompt <= len(self.tokens) <= self.max_len, self
        if self.state != RUNNING:
            assert not self.known_to_runtime, self
            assert not self.room, self
        if self.host_tables:
            assert self.computed > 0 and self.state != RUNNING, self
        elif self.state not in (RUNNING, WAITING_FOR_KV):
            assert self.computed == 0 and not any(self.block_tables), self
