"""A sequence: its known tokens, and how many of them are computed.

    known     t0 t1 t2 t3 t4 t5        prompt, then sampled tokens
    computed  ────────────►            KV in place for t0 … t3
    next step         t4 t5            `computed` catches up with the known tokens

A prompt chunk, a decode step, a fork and a resumed sequence differ only in these two numbers.

If a grammar allows only one token it need not be sampled: it is known at once, and the step that
computes the sampled token computes it too (jump forward).

    known     t0 … t4 {                { was sampled
    forced            { " n a m e      five tokens are known after it, none of them computed
    next step         { " n a m e      one row of 6 tokens; the last one is sampled from
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
"""State of a sequence with a row and blocks, whose KV is being copied into them."""
MAX_FORCED = 16
"""Upper bound of forced tokens in one step, which then stays about as short as a decode step."""


class Sequence:
    """State of one of the `n` sequences of a request."""

    __slots__ = (
        "arrived_s",
        "block_tables",
        "capacity",
        "chain",
        "computed",
        "diverges_at",
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
        "num_listed",
        "num_lost",
        "num_prompt",
        "num_reclaimed",
        "num_shared",
        "parcel_id",
        "policy_state",
        "prompt_logprobs",
        "request",
        "request_id",
        "restored",
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
        """By group: number of released entries of the table, outside the window."""
        self.shares_blocks = False
        self.capacity = 0
        """Tokens that its blocks hold, so that `KVCache.extend` need not be called; 0: unknown."""
        self.chain: Chain | None = None
        """Keys of its full blocks, with a prefix cache."""
        self.num_listed = 0
        """Number of its blocks that are listed in the prefix cache."""
        self.num_shared = 0
        """Tokens of its prefix whose blocks other sequences held when it started."""
        self.num_forced = 0
        """Number of its last tokens that a grammar forced and the runtime does not know yet."""
        self.state = WAITING
        self.known_to_runtime = False
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.seed = seed
        self.scaled_len = scaled_len
        """Length that its RoPE is scaled for; 0: not scaled; None: scaling is not by length."""
        self.forks: list[Sequence] = []
        """Sequences of the same request that start when this one's prompt is computed."""
        self.wants_prompt_logprobs = index == 0 and request.sampling.prompt_logprobs is not None
        self.takes_hits = not self.wants_prompt_logprobs
        """Whether it may start after a prefix from the cache."""
        self.kv_read = kv_read
        """Share of the context that a token reads, from token `reads_from` on."""
        self.kv_keep = kv_keep
        """Share of the first `chooses_at` tokens whose KV is kept for later tokens."""
        self.dropped = [0] * num_groups
        """By group: number of blocks missing in the table, because their KV was dropped."""
        self.takes_restores = True
        """Whether it may start after KV of a lower tier; not after a restore failed."""
        self.restored: dict[str, int] = {}
        """Tokens restored from lower tiers, by tier."""
        self.source: Tier | None = None
        """Another engine that has computed its prefix."""
        self.parcel_id = b""
        """Name of its full blocks for another engine that will continue it."""
        self.num_exported = 0
        """Number of blocks, from the first on, that were exported to that engine."""
        self.diverges_at = -1
        """Block after which its prompt differs from other prompts; -1: unknown."""
        self.is_forgotten = False
        """Whether its blocks are not listed, because its owner was dropped or it failed."""
        self.grammar: GrammarState | None = None
        """The state of its grammar, if it has one."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.first_scheduled_s: float | None = None
        self.num_cached = 0
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        self.num_lost = 0
        """Tokens that were computed when it was preempted, until it resumes."""
        self.num_reclaimed = 0
        """How often its slot was reclaimed for a user below its share."""
        self.arrived_s = request.arrived_s
        self.first_token_s: float | None = None
        self.policy_state: Any = None
        """State of the scheduling policy; only the policy reads and writes it."""

    def resume(self, generated: list[int]) -> None:
        """Continue after tokens that another engine has generated."""
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
        """Return the root key of its chain."""
        request = self.request
        return root_key(request.principal.cache_salt, request.adapter, self.scaled_len)

    @property
    def reads_from(self) -> int:
        """Return the first token that reads a share of its context: generated, or scored."""
        scored = self.request.sampling.prompt_logprobs is not None
        return 0 if scored else self.num_prompt

    @property
    def chooses_at(self) -> int:
        """Return the number of tokens of whose KV a share is kept: its prompt.

        For a prompt that is scored it is half, so that the other half shows the loss.
        """
        scored = self.request.sampling.prompt_logprobs is not None
        return self.num_prompt // 2 if scored else self.num_prompt

    @property
    def num_exact(self) -> int:
        """Return the number of tokens whose KV equals that of any request with this prefix.

        Later tokens see a share of their context, so other requests must not reuse them.
        """
        if self.kv_keep < 1:
            return self.chooses_at
        return len(self.tokens) if self.kv_read >= 1 else self.reads_from

    @property
    def max_cached(self) -> int:
        """Return the maximum tokens that it may take from the prefix cache: not the last one."""
        return min(len(self.tokens) - 1, self.num_exact)

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Return the number of known tokens that are not computed."""
        return len(self.tokens) - self.computed

    def num_news(self, begin: int, end: int) -> int:
        """Return how many of its tokens `begin` … `end` - 1 the runtime does not know."""
        return end - max(begin, len(self.tokens) - self.num_forced) if self.num_forced else 0

    @property
    def may_jump(self) -> bool:
        """Return whether forced tokens need no logits; log-probabilities would need them."""
        return self.grammar is not None and self.request.sampling.logprobs is None

    def append(self, token_id: int) -> str | None:
        """Append a token; returns the finish reason, or None if the sequence continues.

        `error` is a token that the grammar does not allow, which is not appended: the result of an
        outdated mask, or of an executor without masks.
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
        while self.num_forced < MAX_FORCED:
            token_id = self.grammar.only_token()
            if token_id is None:
                return
            self.num_forced += 1
            yield token_id

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Append the new entries; those of a preempted prompt are computed twice, reported once."""
        self.prompt_logprobs += entries[max(len(self.prompt_logprobs) - start, 0) :]

    def hides(self, token_id: int) -> bool:
        """Return whether `token_id`, which ended the sequence, is a stop token and not text."""
        return token_id in self.stop_ids or (self.grammar is not None and self.grammar.ended)

    def introduction(self) -> NewSequence:
        """Return its introduction to the runtime: all tokens, forced ones included."""
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
        """Assert the invariants of a sequence between steps."""
        assert 0 <= self.computed <= len(self.tokens), self
        assert 0 <= self.num_forced <= min(self.num_generated, MAX_FORCED), self
        if self.grammar is not None and not self.grammar.is_released:
            assert self.grammar.num_accepted == self.num_generated, self
        assert self.num_prompt <= len(self.tokens) <= self.max_len, self
        if self.state != RUNNING:
            assert not self.known_to_runtime, self
            assert not self.capacity, self
        if self.host_tables:
            assert self.computed > 0 and self.state != RUNNING, self
        elif self.state not in (RUNNING, WAITING_FOR_KV):
            assert self.computed == 0 and not any(self.block_tables), self
