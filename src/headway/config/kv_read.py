"""Which share of its context a generated token reads: `--kv-read`, and what follows from it.

A layer that chooses reads the first block, the newest and those between that promise the highest
scores (Tang et al. 2024, Quest). Nothing is given up, so the next token may read others. Worked
example, a share of 25%, blocks of 16, token 1,000 (63 blocks): 16 blocks are read, 8 at the least
where a quarter would be fewer.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from headway.core.errors import UsageError
from headway.spec import ModelSpec

OPTION = "--kv-read"
FEWEST = 8
"""Blocks that are read at the least: short contexts gain nothing and lose most."""


def read_share(text: str, option: str = OPTION) -> float:
    """The share that `text` names, "25%" or "0.25", 1 where it is empty; UsageError otherwise."""
    if not text:
        return 1.0
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)(%?)", text.strip(), re.ASCII)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{option} is {text[:64]!r}.", "Give a share of the context, as 25%.")
    return share


def blocks_read(share: float, num_blocks: int) -> int:
    """Of so many blocks, how many are read: all of 8, 16 of 63 with a share of a quarter."""
    return min(num_blocks, max(FEWEST, ceil(share * num_blocks)))


def tokens_read(num_tokens: int, share: float, block_size: int, by_layer: Sequence[int]) -> int:
    """Of so many tokens, how many the next one reads in the mean over the layers.

    `by_layer` holds -1 for a layer that chooses, 0 for one that reads all, else the most it sees.
    Of four layers one that chooses a quarter, 1,008 tokens: (256 + 3 · 1,008) / 4 = 820.
    """
    best = min(num_tokens, block_size * blocks_read(share, -(-num_tokens // block_size)))
    most = {-1: best, 0: num_tokens}
    reads = sum(min(num_tokens, most.get(each, each)) for each in by_layer)
    return round(reads / len(by_layer))


def with_bounds(spec: ModelSpec, given: str, block_size: int) -> ModelSpec:
    """`spec` whose layers that see everything and are not whole keep bounds of each block's keys.

    UsageError where `given`, of `--kv-read`, is no share or no layer is left.
    """
    if not given:
        return spec
    read_share(given)
    if spec.latent is not None:
        raise UsageError(
            f"{OPTION} {given}: the latent keys of {spec.architecture} have no bounds yet.",
            f"Leave {OPTION} out.",
        )
    layers = tuple(
        layer
        if layer.window or layer.whole or layer.kv_from is not None
        else replace(layer, bounds=block_size)
        for layer in spec.layers
    )
    if layers == spec.layers:
        raise UsageError(
            f"{OPTION} {given}: every layer has a window or is whole.", f"Leave {OPTION} out."
        )
    return replace(spec, layers=layers)
