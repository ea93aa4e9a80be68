"""The KV cache's settings: what the options say of it, and what the machine and model made of that.

Handed as one object to the engine, to the runtime and to a simulation; the numbers that nobody
derives stand in the option table (`config.options.tables`) and nowhere else.
"""

from dataclasses import dataclass

from headway.config.options import EngineOptions
from headway.spec.context_shards import ContextShards

DEFAULTS = EngineOptions()
DEFAULT_BLOCK_SIZE = 16
"""Tokens; as vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Blocks by KV group, in the device's memory and the host's, and what stays in free ones."""

    num_blocks: tuple[int, ...]
    """By group, with the null block that is never given out."""
    windows: tuple[int, ...] = (0,)
    """By group the tokens that a layer sees, 0 for all of them."""
    sinks: tuple[int, ...] = ()
    """By group how many first tokens a layer with a window sees besides; () for none."""
    narrowed: tuple[tuple[int, int], ...] = ()
    """What `--kv-layers` narrowed, as of `config.kv_layers.narrowing`."""
    bounded: tuple[bool, ...] = ()
    """By layer whether a token may read the best blocks alone; () where none may."""
    read: float = 1.0
    """The share of its blocks that a generated token reads there, unless its request says more."""
    chooses: tuple[bool, ...] = ()
    """By layer whether it keeps a part of a computed prompt alone; () where none does."""
    choosing: tuple[int, ...] = ()
    """The groups of these layers."""
    keep: float = 1.0
    """The share of a prompt that is kept there, unless its request says more."""
    open_blocks: bool = False
    """Whether the last of `num_blocks` are of one more group, which holds the blocks that a format
    has not rounded yet: what is seen there is the block of the next token."""
    state_every: int = 0
    """Where it is not 0, the last of `num_blocks` are of layers that keep states: a block holds the
    state behind its last token, and each so many blocks of tokens one is kept for others."""
    ranks: int = 1
    """Where it is more than 1, a context is dealt over so many ranks: a group is what one holds."""
    block_size: int = DEFAULT_BLOCK_SIZE
    dtype: str = ""
    """Of keys and values."""
    prefix_cache: str = DEFAULTS.prefix_cache_policy
    """What goes first of the blocks that are kept; "" keeps none."""
    attention_cost: float = 0.0
    """What each token of context adds to computing one, as a share of all else it takes."""
    host_blocks: tuple[int, ...] = ()
    """KV blocks in host memory by group, () for none; a block of each group takes `block_bytes`."""
    block_bytes: tuple[int, ...] = ()
    disk_folder: str = ""
    """Where KV blocks are kept on a disk; "" keeps none there."""
    disk_bytes: int = 0
    disk_write_bytes_s: float = 0.0
    """Most bytes a second that are written there; 0 writes through, without a limit."""

    @property
    def kept_share(self) -> str:
        """The share of a prompt that is kept, as `/stats` has it: "0.25", or "1" for all."""
        return f"{self.keep:g}"

    @property
    def context_shards(self) -> ContextShards | None:
        """Which rank holds which block, where a context is dealt over ranks."""
        return ContextShards(self.ranks, self.block_size) if self.ranks > 1 else None

    def shown(self, blocks: list[int]) -> list[int]:
        """By KV group of the model, of what there is by group: all ranks together are one."""
        return [sum(blocks)] if self.ranks > 1 else blocks

    @property
    def token_blocks(self) -> tuple[int, ...]:
        """`num_blocks` of the groups that hold tokens of contexts: no open blocks, no states."""
        has_extra_group = self.open_blocks or self.state_every
        return self.num_blocks[:-1] if has_extra_group else self.num_blocks

    @property
    def sink_blocks(self) -> tuple[int, ...]:
        """By group the blocks at the beginning that a window group keeps: 20 sinks in 16s → 2."""
        sinks = self.sinks or (0,) * len(self.windows)
        return tuple(-(-count // self.block_size) for count in sinks)

    @property
    def reaches(self) -> tuple[int, ...]:
        """By KV group of the model the most tokens that one reads: the window and the sinks, 0 for
        all."""
        if self.ranks > 1:
            return self.windows[:1]
        sinks = self.sinks or (0,) * len(self.windows)
        return tuple(w and w + more for w, more in zip(self.windows, sinks, strict=True))
