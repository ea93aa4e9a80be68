"""Another engine as a place where one sequence's blocks are, and what leaves for other engines."""

from collections.abc import Callable, Container
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass

from headway.core.parcel import peer_of
from headway.core.plan import NULL_BLOCK, Transfer
from headway.perf.rates import ReadRate


@dataclass(slots=True)
class PeerTier:
    """Blocks that another engine has given up for a sequence of ours."""

    name: str
    held: TypingSequence[Container[bytes]]
    rate: ReadRate

    def read_s(self, num_bytes: int) -> float:
        """Predicted seconds of a read."""
        return self.rate.read_s(num_bytes)

    def doubt(self) -> None:
        """A read seemed too slow: nothing is measured then."""
        self.rate.doubt()


class PeerExports:
    """Full blocks that the next step gathers for other engines, by KV group and parcel."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, bytes], tuple[list[int], list[bytes], list[bytes]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def add(self, group: int, parcel_id: bytes, block: int, key: bytes, owner: bytes) -> None:
        """`block` holds what is known by `key`, and goes to who has this parcel."""
        if block != NULL_BLOCK:
            lists = self._by_place.setdefault((group, parcel_id), ([], [], []))
            for own, one in zip(lists, (block, key, owner), strict=True):
                own.append(one)  # type: ignore[attr-defined]

    def spills(self, next_id: Callable[[], int]) -> list[Transfer]:
        """The transfers that gather them."""
        out = [
            Transfer(
                next_id(),
                group,
                blocks,
                "out",
                peer_of("", parcel_id),
                keys=keys,
                owners=owners,
            )
            for (group, parcel_id), (blocks, keys, owners) in self._by_place.items()
        ]
        self._by_place = {}
        return out
