"""Which share of a prompt's tokens is kept once it is computed: `--kv-keep`, what follows from it.

A layer that chooses keeps the first tokens, the newest and the best between, for each KV head
others; the rest is given up. Every head keeps as many, in whole blocks fewer, so one block table
serves them all. Worked example, a share of 25%, blocks of 16, a prompt of 1,000 tokens: 250 would
be a quarter, 46 blocks are given up, 264 tokens are kept, and the keys of token 1,000 lie where
those of 264 would.

The best are those whose keys are least like the others' (KeyDiff: Park et al. 2025).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from headway.config.kv_read import read_share
from headway.core.errors import UsageError
from headway.spec import ModelSpec

OPTION = "--kv-keep"
FEWEST = 64
"""Tokens that are kept at the least: short prompts gain nothing and lose most."""
FIRST, NEWEST = 4, 16
"""Tokens at both ends of a prompt that every head keeps."""


def keep_share(text: str) -> float:
    """Return the share that `text` names, as "25%", or 1 where it is empty; UsageError else."""
    share, colon, _ = text.partition(":")
    if colon:
        raise UsageError(
            f"{OPTION} is {text[:64]!r}, and methods are gone: KeyDiff alone chooses.",
            f"Give a share alone, {share[:16] or '25%'}.",
        )
    return read_share(share, OPTION)


def blocks_dropped(share: float, num_tokens: int, block_size: int) -> int:
    """Whole blocks by which a prompt of so many tokens shrinks: 46 of 63 with a quarter."""
    count = max(FEWEST, ceil(share * num_tokens))
    return max(0, num_tokens - count) // block_size


def count_kept_tokens(share: float, num_tokens: int, block_size: int) -> int:
    """Of so many tokens of a prompt, how many each head keeps: 264 of 1,000 with a quarter."""
    return num_tokens - blocks_dropped(share, num_tokens, block_size) * block_size


def with_choosing(spec: ModelSpec, given: str) -> ModelSpec:
    """`spec` whose layers that see everything and are not whole choose what they keep.

    UsageError where `given`, of `--kv-keep`, is no share or no layer is left.
    """
    if not given:
        return spec
    keep_share(given)
    choosing = [not (layer.window or layer.whole) for layer in spec.layers]
    why = "" if any(choosing) else "every layer has a window or is whole"
    if spec.latent is not None or any(layer.kv_from is not None for layer in spec.layers):
        why = f"latent keys, or keys that other layers read ({spec.architecture}), are all kept yet"
    if why:
        raise UsageError(f"{OPTION} {given}: {why}.", f"Leave {OPTION} out.")
    pairs = zip(spec.layers, choosing, strict=True)
    return replace(spec, layers=tuple(replace(layer, chooses=each) for layer, each in pairs))


def keep_limits(
    num_tokens: int, share: float, block_size: int, chooses: Sequence[bool]
) -> list[tuple[int, int]]:
    """By layer (0, the most tokens that it keeps of a prompt), 0 for all of them."""
    count = count_kept_tokens(share, num_tokens, block_size)
    return [(0, count if each else 0) for each in chooses]
