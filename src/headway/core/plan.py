"""Interface between engine and runtime: the engine sends a plan, the runtime returns a result.

A `StepPlan` contains changes only; the runtime keeps the state of every sequence it knows. Worked
example, blocks of 4 slots, one KV group. Sequence 7 has the prompt [5, 6, 7, 8, 9]:

    step 0  new=[7: 5 6 7 8 9]  scheduled=[7: start 0, tokens 5 6 7 8 9, blocks [[3, 1]], sample]
            slots 12 13 14 15 4 are written; the result has its sample, for example 2
    step 1  scheduled=[7: start 5, tokens 2, blocks [[]], sample]        slot 5 is written
    step 2  finished=[7]                                                the runtime forgets it

All structs are msgspec messages, so a remote rank gets the same plan.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headway.core.request import SamplingParams, TokenLogprobs

NULL_BLOCK = 0
"""Block 0 of each KV group is never allocated: padding reads and writes there."""
BlocksByGroup = Sequence[Sequence[int]]
"""Block ids, by KV group."""


def sampled_in(step: int) -> int:
    """Return the placeholder id for the token that a sequence samples in step `step`: -1 - step."""
    return -1 - step


class NewSequence(msgspec.Struct, array_like=True, gc=False):
    """Sequence that the runtime does not know yet; `token_ids` are all its known tokens.

    After a preemption these include generated ones: `num_prompt_tokens` tells where they begin, so
    that penalties and seeds continue. `index` distinguishes the `n` sequences of one request.
    `stop_ids` are suppressed until `min_tokens` were generated. From position `reads_from` on a
    token reads the share `kv_read` of its blocks, in layers that choose. `dropped` has by KV group
    the number of blocks that its table is shorter than its tokens, see `Shrink`. `scaled_len` is
    the length that RoPE is scaled for, 0: not scaled (`RopeSpec.scaled_len`).
    """

    sequence_id: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: list[int] = []
    adapter: str = ""
    kv_read: float = 1.0
    reads_from: int = 0
    dropped: list[int] = []
    scaled_len: int = 0


class ScheduledSequence(msgspec.Struct, array_like=True, gc=False):
    """Row of a step: one sequence advances by `len(token_ids)` tokens.

    `start` is the position of the first, the number of tokens whose KV is in place. `new_blocks`
    has, per KV group, the ids appended to its block table. Token i has position start + i; its slot
    follows from the block table. `sample` says whether the last token is sampled from.

    The last `num_drafts` tokens are draft tokens. Behind the last known token and behind each draft
    token the runtime samples what it would sample without them, and draft tokens are accepted as
    long as they equal that. Tokens known up to t9, draft tokens a b c, 4 sampled rows:

        token_ids      t9 a b c
        sampled        a  b x y        the result has a b x; c was rejected, so y is not a token

    `propose` asks the drafter for this many draft tokens of what follows (`Sample.drafts`).

    Of the tokens before the draft tokens the last `num_forced` are new to the runtime: the grammar
    allowed no others, so they were not sampled. They are known from now on:

        token_ids      t9 { " n a b c      t9 was sampled; { " n are forced, a b c are draft tokens
    """

    sequence_id: int
    start: int
    token_ids: list[int]
    new_blocks: BlocksByGroup
    sample: bool
    num_drafts: int = 0
    propose: int = 0
    num_forced: int = 0

    @property
    def drafts(self) -> list[int]:
        """Return the draft tokens at the end."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def forced(self) -> list[int]:
        """Return the forced tokens before the draft tokens."""
        end = len(self.token_ids) - self.num_drafts
        return self.token_ids[end - self.num_forced : end]

    def without_drafts(self) -> "ScheduledSequence":
        """Return the row without draft tokens, for a sequence that is introduced again."""
        known = self.token_ids[: len(self.token_ids) - self.num_drafts]
        return msgspec.structs.replace(self, token_ids=known, num_drafts=0, propose=0, num_forced=0)


class BlockCopy(msgspec.Struct, array_like=True, gc=False):
    """Copy-on-write: block `source` of `group` is copied to `target` before the forward.

    `target` takes the place of `source` at `index` of the block table of `sequence_id`. No target
    is the source of another.
    """

    sequence_id: int
    index: int
    group: int
    source: int
    target: int


class Shrink(msgspec.Struct, array_like=True, gc=False):
    """Each head of `group` keeps as many of the first `num_tokens` tokens as `blocks` hold.

    The runtime chooses them by the keys in `sources`, and stores them in `blocks` in their order;
    later tokens follow. The table is len(sources) - len(blocks) entries shorter, for good. Worked
    example, blocks of 4, a prompt of 18 tokens that shrinks by 2 blocks:

        sources [3 8 1 5 2]   blocks [9 4 7]   10 tokens are kept, token 18 is in block 7, slot 2
    """

    sequence_id: int
    group: int
    num_tokens: int
    sources: list[int]
    blocks: list[int]


class Transfer(msgspec.Struct, array_like=True, gc=False):
    """Move blocks of one group to or from another place; they stay pinned until it is done.

    `direction` is `out` or `in`; `peer` names host memory, a file or another engine. With `host`,
    `host_blocks[i]` is the host block that `blocks[i]` is copied to or from; both stay unchanged
    until then. The transfer begins after the step's `copies`. After a failed step, transfers are
    sent again, so handling them must be idempotent.

    With `keys`, `keys[i]` is the key of `blocks[i]` in that place. Such a transfer `out` has an
    owner for each block, reads before anything of the step is written, ends with the step, is not
    sent again, and its end is not reported. One `in` fails, and writes nothing, if the keys are not
    there, or if it takes longer than `limit_s`.
    """

    transfer_id: int
    group: int
    blocks: list[int]
    direction: str
    peer: str
    host_blocks: list[int] = []
    keys: list[bytes] = []
    owners: list[bytes] = []
    limit_s: float = 0.0

    @property
    def is_spill(self) -> bool:
        """Return whether it stores copies of blocks elsewhere, while these stay in place."""
        return self.direction == "out" and bool(self.keys)


class Moved(msgspec.Struct, array_like=True, gc=False):
    """Result of a transfer from or to `peer`: requested bytes, moved bytes, and seconds."""

    peer: str
    direction: str
    asked_bytes: int
    moved_bytes: int
    seconds: float


class TierNews(msgspec.Struct, array_like=True):
    """Changes of a lower tier: (KV group, key) of blocks that it has stored, or lost.

    `num_bad` blocks were found damaged.
    """

    stored: list[tuple[int, bytes]] = []
    lost: list[tuple[int, bytes]] = []
    num_bad: int = 0


class StepPlan(msgspec.Struct, array_like=True):
    """Work of one step. Rows of `scheduled` that decode (one token, sampled) come first.

    Decodes with draft tokens follow, then chunks.
    """

    step: int
    new: list[NewSequence]
    scheduled: list[ScheduledSequence]
    finished: list[int]
    copies: list[BlockCopy] = []
    transfers: list[Transfer] = []
    shrinks: list[Shrink] = []
    """They read the blocks as before `copies`, and write after them."""
    forget: list[bytes] = []
    """Owners, or prefixes of their names, whose blocks lower tiers erase."""

    @property
    def num_tokens(self) -> int:
        """Return the number of input tokens that the step computes."""
        return sum(len(row.token_ids) for row in self.scheduled)


class GrammarMasks(msgspec.Struct, array_like=True):
    """Masks, which are computed while the model runs: one bit per vocabulary entry.

    `by_sequence[sequence_id]` has a mask for each sampled row, one row without draft tokens:
    little-endian int32 words, bit t set if token t is allowed. A row whose mask allows nothing, or
    without a mask, is not accepted.
    """

    by_sequence: dict[int, list[bytes]] = {}


class Sample(msgspec.Struct, array_like=True, gc=False):
    """Sampled tokens of one sequence: one token, or accepted draft tokens and one more.

    `logprobs` has one entry per token. `drafts` are the drafter's tokens for what follows. `behind`
    was sampled behind draft tokens that were not accepted: what might follow them.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    drafts: list[int] = []
    behind: list[int] = []


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of the prompt tokens at positions `start`, `start + 1`, …"""

    sequence_id: int
    start: int
    entries: list[TokenLogprobs]


class StepTimings(msgspec.Struct, array_like=True, frozen=True):
    """Seconds the runtime spent: batch → tensors, forward, sampling, drafting for the next step."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0


class StepResult(msgspec.Struct, array_like=True):
    """Result of a step: `samples` in the order of the sampled rows of the plan.

    `transfers_done` are the ids of those that ended, of this step or of earlier ones; they took
    `transfer_s` in all, in parallel to the model or not. A plan without rows waits for some.
    `transfers_failed` moved nothing. `moved` reports both by peer, and `tier` the changes of the
    disk since the last report, None without changes.

    `failed` maps a sequence that the runtime could not advance to the reason, for the log.
    `draft_failure` says why the drafter could not draft when it was asked to.
    `experts_read` counts the experts that were used, over all layers; 0 for a dense model.
    """

    step: int
    samples: list[Sample]
    prompt_logprobs: list[PromptLogprobs] = []
    timings: StepTimings = StepTimings()
    transfers_done: list[int] = []
    failed: dict[int, str] = {}
    experts_read: int = 0
    transfer_s: float = 0.0
    draft_failure: str = ""
    transfers_failed: list[int] = []
    moved: list[Moved] = []
    tier: TierNews | None = None


class Ceilings(msgspec.Struct, kw_only=True):
    """Peak rates of the machine, for the threads and the type that the kernels use.

    Measured values are the best of all probes, 0 if nothing was measured; those of the data sheet
    are None if unknown. FLOP/s are dense, of `flops_dtype`. `cache_bytes` is the last-level cache.
    `last_share` is the last probe's result as a share of the best one.
    """

    bandwidth_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    flops_dtype: str = ""
    datasheet_bandwidth_bytes_per_s: float | None = None
    datasheet_flops_per_s: float | None = None
    cache_bytes: int = 0
    num_probes: int = 0
    last_share: float = 1.0


class Description(msgspec.Struct):
    """Machine and kernels, for the doctor and the start-up lines.

    `kernels` maps an operation to (the chosen kernel, the reason); `name` is the processor's. A
    weight that a step reads has `bytes_per_weight` in the mean; 0: those of the type.
    """

    device: str
    kernels: dict[str, tuple[str, str]] = {}
    weight_bytes: int = 0
    bytes_per_weight: float = 0.0
    kv_bytes: int = 0
    name: str = ""
    ceilings: Ceilings = msgspec.field(default_factory=Ceilings)


class Executor(Protocol):
    """Interface of the runtime: submit starts a forward, sample takes masks, collect waits."""

    def submit(self, plan: StepPlan) -> None:
        """Start the forward of `plan`."""
        ...

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Hand in the masks of step `step` and sample."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step and return its result."""
        ...

    def describe(self) -> Description:
        """Return what the machine is, and which kernels were chosen and why."""
        ...

    def probe(self, budget_s: float) -> None:
        """Measure the machine's ceilings for at most `budget_s`, or once with 0; keep the best."""
        ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """Executor that accepts further steps before `collect` has returned the oldest."""

    def abandon(self) -> None:
        """Drop the steps that were not collected, once none of them runs any more."""
        ...


@runtime_checkable
class AwaitingExecutor(Executor, Protocol):
    """Executor whose steps are computed by other processes while the caller's thread sleeps."""

    @property
    def awaited(self) -> Sequence[int]:
        """Return the ids of these processes."""
        ...


def run(executor: Executor, plan: StepPlan, masks: GrammarMasks | None = None) -> StepResult:
    """Submit, sample and collect one step."""
    executor.submit(plan)
    executor.sample(plan.step, masks or GrammarMasks())
    return executor.collect()
