"""What the fake runtime samples: a hash of the tokens it read, and the whole answer by it; what it
remembers of a sequence and of a transfer, and the settings of an engine over it."""

from dataclasses import dataclass, field

from headway.config.cache_config import CacheConfig
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.plan import NewSequence, Transfer
from headway.core.request import SamplingParams

MULTIPLIER = 6364136223846793005
SCHEDULING = SchedulerConfig.__dataclass_fields__.keys()
CACHE = CacheConfig.__dataclass_fields__.keys()


def make_settings(
    *,
    block_size=4,
    num_blocks=(65,),
    windows=(),
    max_model_len=None,
    max_num_seqs=4,
    budget=16,
    seed=0,
    policy="fcfs",
    **more,
) -> Settings:
    """Settings of an engine over a fake; `more` are fields of these or of what nests in them."""
    capacity = (min(num_blocks) - 1) * block_size
    scheduling = {name: more.pop(name) for name in SCHEDULING & more.keys()}
    cache = {name: more.pop(name) for name in CACHE & more.keys()}
    return Settings(
        device="fake",
        dtype="float32",
        load_format="dummy",
        attention_backend="none",
        max_model_len=min(max_model_len or capacity, capacity),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            windows=(*windows, 0, 0)[: len(num_blocks)],
            **cache,
        ),
        threads=1,
        seed=seed,
        scheduler=SchedulerConfig(policy=policy, **scheduling),
        **more,
    )


def next_token(tokens: list[int], seed: int, index: int, banned: list[int], vocab_size: int) -> int:
    """The fake model: a hash of all it sees, moved on past the tokens that may not come yet."""
    state = hash((tuple(tokens), seed, index)) * MULTIPLIER % 2**64 >> 24
    allowed = [t for t in range(vocab_size) if t not in banned] if banned else range(vocab_size)
    return allowed[state % len(allowed)]


def answer(
    prompt: list[int],
    sampling: SamplingParams,
    *,
    seed: int,
    index: int,
    stop_ids: set[int],
    max_len: int,
    vocab_size: int,
    sight: int = 0,
) -> tuple[list[int], str]:
    """The tokens and the finish reason of one sequence, computed with no engine at all.

    `sight` is how many tokens back the model sees, 0 for all.
    """
    tokens = list(prompt)
    while True:
        generated = len(tokens) - len(prompt)
        banned = sorted(stop_ids) if generated < sampling.min_tokens else []
        tokens.append(next_token(tokens[-sight:], seed, index, banned, vocab_size))
        if tokens[-1] in stop_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) in (max_len, len(prompt) + (sampling.max_tokens or 0)):
            return tokens[len(prompt) :], "length"


@dataclass
class Mirrored:
    """What the fake remembers of one sequence: its known tokens and its block tables."""

    new: NewSequence
    tokens: list[int]
    tables: list[list[int]]
    root: object = None
    cells: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """By group how many blocks its table is shorter than its tokens; mostly nothing."""

    def cell(self, position: int) -> tuple[int, int]:
        """(token, hash of all that a position's KV depends on)."""
        while len(self.cells) <= position:
            before = self.cells[-1] if self.cells else self.root
            token = self.tokens[len(self.cells)]
            self.cells.append((token, hash((before, token))))
        return self.cells[position]


@dataclass
class Moving:
    """A transfer under way, the steps it still takes, and what both ends held when it began."""

    transfer: Transfer
    num_steps: int
    ends: list
