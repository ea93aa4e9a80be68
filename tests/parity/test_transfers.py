"""Blocks copied to host memory and back are the same to the bit, in every layout and place."""

import pytest
import torch

from headway.core.plan import Transfer
from headway.runtime.attention.cache import KVLayer, allocate_kv
from headway.runtime.attention.native import NativeKVLayer, PairedKVLayer
from headway.runtime.kvstore.transfers import StoreTransfers, runs
from headway.runtime.transfers import make_transfers
from headway.spec import KVGroupSpec

GROUPS = tuple(
    KVGroupSpec(layers=layers, num_kv_heads=2, head_dim=8, window=window)
    for layers, window in (((0, 2), 0), ((1,), 32))
)
KINDS = [
    (KVLayer, torch.float32),
    (KVLayer, torch.bfloat16),
    (NativeKVLayer, torch.int8),
    (PairedKVLayer, torch.bfloat16),
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


def filled(kind: type[KVLayer], dtype: torch.dtype, device: str) -> list[KVLayer]:
    layers = allocate_kv(GROUPS, (12, 9), 4, dtype, device, kind)
    for layer in layers:
        for part in layer.parts:
            part.copy_(torch.randint(-100, 100, part.shape).to(part.dtype))
    return layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_blocks_come_back_unchanged(kind, dtype, device):
    """They are copied into other blocks than before; all other blocks stay unchanged."""
    if device == "cuda" and kind is NativeKVLayer:
        pytest.skip("a CPU's layout")
    layers = filled(kind, dtype, device)
    before = [[part.clone() for part in layer.parts] for layer in layers]
    transfers = make_transfers(layers, (6, 4), device)
    assert transfers is not None
    transfers.begin([Transfer(7, 0, [5, 6, 9, 2], "out", "host", [0, 1, 2, 5])])
    assert transfers.take_done(wait=True)[0] == [7]
    assert transfers.take_done(wait=True)[0] == []
    transfers.begin([Transfer(8, 0, [1, 2, 3, 4], "in", "host", [0, 1, 2, 5])])
    done, seconds = transfers.take_done(wait=True)
    assert done == [8] and seconds >= 0
    for layer, parts in zip(layers, before, strict=True):
        for part, old in zip(layer.parts, parts, strict=True):
            if layer.group == 0:
                assert torch.equal(part[[1, 2, 3, 4]], old[[5, 6, 9, 2]])
                assert torch.equal(part[5:], old[5:]) and torch.equal(part[0], old[0])
            else:
                assert torch.equal(part, old)


def test_a_repeated_transfer_is_done_once():
    """A transfer whose step raised is part of the next plan again."""
    layers = filled(KVLayer, torch.float32, "cpu")
    transfers = make_transfers(layers, (6, 4), "cpu")
    assert transfers is not None
    for _ in range(2):
        transfers.begin([Transfer(7, 1, [5], "out", "host", [3])])
    assert transfers.take_done(wait=False)[0] == [7]


def test_without_host_blocks_there_are_no_transfers():
    assert make_transfers([], (), "cpu") is None


def test_neighbours_are_copied_at_once():
    assert runs([5, 6, 9], [0, 1, 2]) == [(5, 0, 2), (9, 2, 1)]
    assert runs([5, 6, 7], [2, 1, 0]) == [(5, 2, 1), (6, 1, 1), (7, 0, 1)]
    assert runs([], []) == []


# ── from a store ────────────────────────────────────────────────────────────────────────────────


class OddLayer(KVLayer):
    """Parts whose blocks do not begin where a number of theirs may begin."""

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.k, self.v]


def odd(num_blocks: int) -> list[KVLayer]:
    numbers = torch.arange(3 * num_blocks, dtype=torch.int8).view(num_blocks, 3)
    return [OddLayer(numbers, torch.rand(num_blocks, 2), 0)]


@pytest.mark.parametrize("layers", [filled(*KINDS[1], "cpu"), filled(*KINDS[2], "cpu"), odd(12)])
@pytest.mark.parametrize("blocks", [list(range(2, 12)), [7, 2, 9, 4], [5, 6, 7, 8, 9, 1]])
def test_blocks_of_a_store_are_written_to_their_places_only(layers, blocks):
    def start(transfer, keys, into, landed):
        for stored, place in zip(left, into, strict=True):
            place[:] = memoryview(stored.numpy())
        landed(True)

    transfers = StoreTransfers(layers, 2, start)
    whole = list(range(1, 1 + len(blocks)))
    left = transfers.gather(Transfer(0, 0, whole, "out", "disk"))
    before = [[part.clone() for part in layer.parts] for layer in layers]
    transfers.begin(Transfer(1, 0, blocks, "in", "disk", keys=[b""] * len(blocks)))
    assert transfers.take_done(wait=True)[:2] == ([1], [])
    others = [block for block in range(12) if block not in blocks]
    for layer, parts in zip(layers, before, strict=True):
        for part, old in zip(layer.parts, parts, strict=True):
            if layer.group == 0:
                assert torch.equal(part[blocks], old[whole])
                assert torch.equal(part[others], old[others])
            else:
                assert torch.equal(part, old)


def test_staging_memory_of_an_abandoned_read_is_not_reused_before_its_end():
    late: list[memoryview] = []

    def start(transfer, keys, into, landed):
        if not late:
            late.extend(into)
            return
        into[0][:] = b"\1" * len(into[0])
        late[0][:] = b"\7" * len(late[0])
        landed(True)

    layers = [OddLayer(*torch.zeros(2, 4, 8, dtype=torch.int8), 0)]
    transfers = StoreTransfers(layers, 1, start)
    transfers.begin(Transfer(1, 0, [3], "in", "disk", keys=[b""], limit_s=1e-9))
    assert transfers.take_done(wait=True)[:2] == ([], [1])
    for number in (2, 3):  # the second lands in the memory of the first
        layers[0].k.zero_()
        transfers.begin(Transfer(number, 0, [2], "in", "disk", keys=[b""]))
        assert transfers.take_done(wait=True)[:2] == ([number], [])
        assert layers[0].k[2].tolist() == [1] * 8 and not layers[0].k[3].any()
