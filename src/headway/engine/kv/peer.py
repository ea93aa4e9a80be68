"""Another engine as a tier for one sequence's blocks, and the export of blocks to other engines."""

from collections.abc import Callable, Container
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass

from headway.core.parcel import peer_of
from headway.core.plan import NULL_BLOCK, Transfer
from headway.perf.rates import ReadRate


@dataclass(slots=True)
class PeerTier:
    """Blocks that another engine has exported for one sequence."""

    name: str
    held: TypingSequence[Container[bytes]]
    rate: ReadRate

    def read_s(self, num_bytes: int) -> float:
        """Return the predicted seconds of a read."""
        return self.rate.read_s(num_bytes)

    def doubt(self) -> None:
        """Record that a read seemed too slow to start, so that the rate is measured again."""
        self.rate.doubt()


class PeerExports:
    """Full blocks that the next step gathers for other engines, by KV group and parcel."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, bytes], tuple[list[int], list[bytes], list[bytes]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def add(self, group: int, parcel_id: bytes, block: int, key: bytes, owner: bytes) -> None:
        """Add `block`, whose content has this `key`, to the export of a parcel."""
        if block != NULL_BLOCK:
            lists = self._by_place.setdefault((group, parcel_id), ([], [], []))
            for own, one in zip(lists, (block, key, owner), strict=True):
                own.append(one)  # type: ignore[attr-defined]

    def spills(self, next_id: Callable[[], int]) -> list[Transfer]:
        """Return the transfers that gather the blocks."""
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
