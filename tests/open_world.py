"""A world whose KV is rounded when a block is full: one more group holds the open blocks."""

import random

from engine_world import World, make_settings
from fakes import FakeExecutor, with_cache
from headway.config.resolve import Settings


class OpenExecutor(FakeExecutor):
    """Of the open blocks, the last group, a row reads its own from the beginning on."""

    def _first_seen(self, group: int, position: int) -> int:
        if group == len(self.num_blocks) - 1:
            return position // self.block_size * self.block_size
        return super()._first_seen(group, position)


def with_open(settings: Settings, num_open: int) -> Settings:
    """The same with so many open blocks, whose group is the last."""
    num_blocks = (*settings.cache.num_blocks, num_open + 1)
    return with_cache(settings, num_blocks=num_blocks, open_blocks=True)


def open_world(
    num_blocks: tuple[int, ...],
    num_open: int,
    guesses: random.Random | None = None,
    *,
    windows: tuple[int, ...] = (0,),
    **how,
) -> World:
    """A world of `num_open` open blocks beside `num_blocks` by group."""
    shape = make_settings(num_blocks=num_blocks, windows=windows, **how)
    return World(with_open(shape, num_open), guesses, kind=OpenExecutor)


def check_open(world: World) -> None:
    """Between steps each that runs holds no open block but the one of its next token.

    A wrong guess may leave one more.
    """
    kv = world.engine.kv
    for sequence in world.engine.scheduler.running:
        if not world.executor.had_drafts:
            begun = sequence.computed % kv.block_size > 0
            assert len(kv.live(sequence, len(kv.pools) - 1)) <= begun, sequence
