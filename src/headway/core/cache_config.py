"""The KV cache's settings: what the options say of it, and what the machine and model made of that.

Handed as one object to the engine, to the runtime and to a simulation; the numbers that nobody
derives stand in the option table (`core.options.tables`) and nowhere else.
"""

from dataclasses import dataclass

from headway.core.options import EngineOptions

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
    open_blocks: bool = False
    """Whether the last of `num_blocks` are of one more group, which holds the blocks that a format
    has not rounded yet: what is seen there is the block of the next token."""
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

    @property
    def token_blocks(self) -> tuple[int, ...]:
        """`num_blocks` of the groups that hold whole contexts: without the open blocks."""
        return self.num_blocks[:-1] if self.open_blocks else self.num_blocks

    @property
    def sink_blocks(self) -> tuple[int, ...]:
        """By group the blocks at the beginning that a window group keeps: 20 sinks in 16s → 2."""
        sinks = self.sinks or (0,) * len(self.windows)
        return tuple(-(-count // self.block_size) for count in sinks)

    @property
    def reaches(self) -> tuple[int, ...]:
        """By group the most tokens that one reads: the window and the sinks, 0 for all."""
        sinks = self.sinks or (0,) * len(self.windows)
        return tuple(w and w + more for w, more in zip(self.windows, sinks, strict=True))
