"""The seam: a plan goes down from the engine, a result comes back from the runtime.

A `StepPlan` holds deltas only; the runtime keeps the state of every sequence it was told of.
Worked example, blocks of 4 slots, one KV group. Sequence 7 has the prompt [5, 6, 7, 8, 9]:

    step 0  new=[7: 5 6 7 8 9]  scheduled=[7: start 0, tokens 5 6 7 8 9, blocks [[3, 1]], sample]
            slots 12 13 14 15 4 are written; the result holds its sample, say 2
    step 1  scheduled=[7: start 5, tokens 2, blocks [[]], sample]        slot 5 is written
    step 2  finished=[7]                                                the runtime forgets it

All structs are msgspec messages, so a plan for a remote rank is the same plan.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headway.core.request import SamplingParams, TokenLogprobs

NULL_BLOCK = 0
"""Block 0 of each KV group is never given out: padding reads and writes there."""
BlocksByGroup = Sequence[Sequence[int]]
"""Block ids, by KV group."""


def sampled_in(step: int) -> int:
    """The input id that stands for "what this sequence sampled in step `step`": -1 - step."""
    return -1 - step


class NewSequence(msgspec.Struct, array_like=True, gc=False):
    """A sequence the runtime does not know yet; `token_ids` are all its known tokens.

    After a preemption the known tokens hold generated ones too: `num_prompt_tokens` tells where
    they begin, so that penalties and seeds go on as if nothing had happened. `index` tells the
    `n` sequences of one request apart. `stop_ids` are held back until `min_tokens` are out. From
    position `reads_from` on a token reads the share `kv_read` of its blocks, where a layer chooses.
    `dropped` says by KV group how many blocks its table is shorter than its tokens, as of `Shrink`.
    `scaled_len` is the length that its rope is scaled for, 0: not scaled (`RopeSpec.scaled_len`).
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
    """One sequence moves on by `len(token_ids)` tokens.

    `start` is the position of the first, the number of tokens whose KV is in place. `new_blocks`
    holds, per KV group, the ids appended to its block table. Token i has position start + i; its
    slot follows from the block table. `sample` says whether the last token is sampled from.

    The last `num_drafts` tokens are drafts: guesses that are verified. Behind the last known token
    and behind each draft the runtime samples what it would sample without drafts, and drafts count
    as long as they equal that. Tokens known up to t9, drafts a b c, 4 sampled rows:

        token_ids      t9 a b c
        sampled        a  b x y        the result holds a b x; c was wrong, so y means nothing

    `propose` asks the drafter for so many guesses of what follows (`Sample.drafts`).

    Of the tokens before the drafts the last `num_forced` are news: a grammar left only them, so
    nobody sampled them. They are known from now on:

        token_ids      t9 { " n a b c      t9 was sampled; { " n are forced, a b c are drafts
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
        """The tokens at the end that are guesses."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def forced(self) -> list[int]:
        """The tokens before the drafts that are news."""
        end = len(self.token_ids) - self.num_drafts
        return self.token_ids[end - self.num_forced : end]

    def without_drafts(self) -> "ScheduledSequence":
        """The same row of a sequence introduced anew, for a step as plain as possible."""
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
    """Of the first `num_tokens` of a sequence each head of `group` keeps as many as `blocks` need.

    They are chosen by the runtime from the keys in `sources`, and lie in `blocks` from now on, in
    their order; whatever comes behind follows. The table is len(sources) - len(blocks) entries
    shorter, for good. Worked example, blocks of 4, a prompt of 18 tokens that shrinks by 2 blocks:

        sources [3 8 1 5 2]   blocks [9 4 7]   10 tokens are kept, token 18 lies in block 7, slot 2
    """

    sequence_id: int
    group: int
    num_tokens: int
    sources: list[int]
    blocks: list[int]


class Transfer(msgspec.Struct, array_like=True, gc=False):
    """Move blocks of one group to or from elsewhere; they stay pinned until it is done.

    `direction` is `out` or `in`, `peer` names host memory, a file or another engine. With `host`,
    `host_blocks[i]` is the block there that `blocks[i]` is copied to or from; both stay as they
    are until then. It begins after the step's `copies`. After a failed step, transfers are sent
    again; handling must be idempotent.

    Where there are `keys`, `keys[i]` is what `blocks[i]` is known by there. One that goes `out` has
    an owner for each block, is read before anything of the step is written, ends with the step, is
    not told again, and its end is not told either. One that comes `in` has failed, and has written
    nothing, where those keys are not there, or when it did not come in `limit_s`.
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
        """Whether it keeps blocks elsewhere that stay where they are."""
        return self.direction == "out" and bool(self.keys)


class Moved(msgspec.Struct, array_like=True, gc=False):
    """What a transfer moved from or to `peer` of what was asked, and how long that took."""

    peer: str
    direction: str
    asked_bytes: int
    moved_bytes: int
    seconds: float


class TierNews(msgspec.Struct, array_like=True):
    """What a lower tier has come to hold or holds no more: (KV group, key) of blocks.

    `num_bad` blocks were found damaged.
    """

    kept: list[tuple[int, bytes]] = []
    lost: list[tuple[int, bytes]] = []
    num_bad: int = 0


class StepPlan(msgspec.Struct, array_like=True):
    """What one step does. Rows of `scheduled` that decode (one token, sampled) come first.

    Those that decode with drafts follow, then chunks.
    """

    step: int
    new: list[NewSequence]
    scheduled: list[ScheduledSequence]
    finished: list[int]
    copies: list[BlockCopy] = []
    transfers: list[Transfer] = []
    shrinks: list[Shrink] = []
    """They read what was there before `copies`, and write behind them."""
    forget: list[bytes] = []
    """Owners, or what their names begin with, whose blocks lower tiers erase."""

    @property
    def num_tokens(self) -> int:
        """How many input tokens the step computes."""
        return sum(len(row.token_ids) for row in self.scheduled)


class GrammarMasks(msgspec.Struct, array_like=True):
    """Known only while the model runs: per sequence id, one bit per vocabulary entry.

    `by_sequence[sequence_id]` has a mask for each sampled row, which is one without drafts:
    little-endian int32 words, bit t set when token t is allowed. A row whose mask allows nothing,
    or that is beyond the last mask, is not kept.
    """

    by_sequence: dict[int, list[bytes]] = {}


class Sample(msgspec.Struct, array_like=True, gc=False):
    """What one sequence sampled: one token, or with drafts those kept and one more.

    `logprobs` has one entry per token. `drafts` are the drafter's draft tokens of what follows.
    `behind` was sampled behind the draft tokens that were not accepted: what might come after them.
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
    """What came back: `samples` in the order of the sampled rows of the plan.

    `transfers_done` are the ids of those that ended, of this step or of earlier ones; they took
    `transfer_s` in all, beside the model or not. A plan that schedules nobody waits for some.
    `transfers_failed` brought nothing. `moved` tells both by peer, and `tier` what the disk holds
    that was not told before, None where nothing is new.

    `failed` maps a sequence the runtime could not advance to the reason, for the log.
    `draft_failure` says why the drafter could not guess where it was asked to.
    `experts_read` counts the experts that were hit, over all layers; 0 for a dense model.
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
    """What the machine can do at best, for the threads and the type that the kernels use.

    Measured values are the best of all probes so far, 0 where nothing was measured; those of the
    datasheet are None where we do not know them. FLOP/s are dense, of `flops_dtype`.
    `cache_bytes` is the last-level cache. Of the best of its kind, the last probe reached
    `last_share`.
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
    """What the machine and its kernels are, for the doctor and the start-up lines.

    `kernels` maps an operation to (the chosen kernel, why); `name` is the processor's. A weight
    that a step reads has `bytes_per_weight` in the mean; 0: those of the type.
    """

    device: str
    kernels: dict[str, tuple[str, str]] = {}
    weight_bytes: int = 0
    bytes_per_weight: float = 0.0
    kv_bytes: int = 0
    name: str = ""
    ceilings: Ceilings = msgspec.field(default_factory=Ceilings)


class Executor(Protocol):
    """The runtime's face: submit starts the forward, sample takes the masks, collect waits."""

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
        """Say what the machine is and which kernels were chosen, and why."""
        ...

    def probe(self, budget_s: float) -> None:
        """Measure the machine's ceilings for at most `budget_s`, or once with 0; keep the best."""
        ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """One that takes the next steps before it has told the oldest, which `collect` is about."""

    def abandon(self) -> None:
        """Forget the steps that were not collected, once none of them runs any more."""
        ...


@runtime_checkable
class AwaitingExecutor(Executor, Protocol):
    """One whose steps other processes compute a part of, while the caller's thread sleeps."""

    @property
    def awaited(self) -> Sequence[int]:
        """The ids of these processes."""
        ...


def run(executor: Executor, plan: StepPlan, masks: GrammarMasks | None = None) -> StepResult:
    """submit, sample and collect in a row."""
    executor.submit(plan)
    executor.sample(plan.step, masks or GrammarMasks())
    return executor.collect()
