"""Copy KV blocks to host memory and back, as `core.plan.Transfer` says.

A store in host memory has the layout of the KV memory: every part of every layer (int8 has scales
as a further part). Runs of adjacent blocks are copied at once. On a CPU a copy is done when `begin`
returns; on CUDA it runs on a stream of its own, parallel to the model, and ends with its event.
Worked example: blocks [5, 6, 9] to host blocks [0, 1, 2] are two copies, 5 … 6 to 0 … 1 and 9 to 2.
"""

from typing import Protocol

import torch
from torch import Tensor

from headway.core.clock import Clock, SystemClock
from headway.core.errors import CapacityError
from headway.core.parcel import ENGINE
from headway.core.plan import StepPlan, StepResult, Transfer
from headway.runtime.attention.cache import KVLayer
from headway.runtime.kvstore.transfers import DISK, DiskTransfers, PeerTransfers, runs

HOST = "host"


class HostMemory:
    """The host blocks of each layer, in parts as `KVLayer.parts`, block ids first."""

    def __init__(self, layers: list[KVLayer], num_blocks: tuple[int, ...], *, pinned: bool) -> None:
        self._layers = layers
        try:
            self._parts = [
                [
                    torch.zeros(
                        (num_blocks[layer.group], *part.shape[1:]),
                        dtype=part.dtype,
                        pin_memory=pinned,
                    )
                    for part in layer.parts
                ]
                for layer in layers
            ]
        except RuntimeError as error:  # torch's out-of-memory is one
            raise CapacityError(
                f"Host memory for KV could not be allocated: {str(error)[:200]}.",
                "Lower --kv-host-memory.",
            ) from error

    def copy(self, transfer: Transfer) -> None:
        """Copy the blocks of `transfer` in every layer of its group, on the current stream."""
        spans = runs(transfer.blocks, transfer.host_blocks)
        for layer, stored in zip(self._layers, self._parts, strict=True):
            if layer.group == transfer.group:
                for part, host_part in zip(layer.parts, stored, strict=True):
                    copy_spans(part, host_part, spans, transfer.direction)

    def gather(self, transfer: Transfer) -> list[Tensor]:
        """Return the blocks of `transfer`, by part of every layer of its group, on their device."""
        parts = [part for layer in self._layers if layer.group == transfer.group
                 for part in layer.parts]  # fmt: skip
        return [part[torch.tensor(transfer.blocks, device=part.device)] for part in parts]

    def store(self, transfer: Transfer, staged: list[Tensor]) -> None:
        """Copy the result of `gather` into the host blocks, on the current stream."""
        host_parts = [part for layer, parts in zip(self._layers, self._parts, strict=True)
                if layer.group == transfer.group for part in parts]  # fmt: skip
        for part, blocks in zip(host_parts, staged, strict=True):
            for at, host in enumerate(transfer.host_blocks):
                part[host].copy_(blocks[at], non_blocking=True)


def copy_spans(
    part: Tensor, host_part: Tensor, spans: list[tuple[int, int, int]], direction: str
) -> None:
    """Copy each (block, host block, count) from `part` to `host_part`, or back."""
    for block, host, count in spans:
        here, there = part[block : block + count], host_part[host : host + count]
        if direction == "out":
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)


class Transfers(Protocol):
    """The interface of transfers with host memory."""

    def keep(self, transfer: Transfer) -> None:
        """Copy the blocks out before the step writes to them."""
        ...

    def begin(self, transfers: list[Transfer]) -> None:
        """Start these, without those in progress: a plan repeats them after a step has raised."""
        ...

    def take_done(self, *, wait: bool) -> tuple[list[int], float]:
        """Return (ids of transfers that ended since the last call, their total seconds).

        With `wait` it waits until at least one has ended, if any is in progress.
        """
        ...


class DirectTransfers:
    """Copies in the caller's thread: a transfer has ended when `begin` returns."""

    def __init__(self, memory: HostMemory, clock: Clock | None = None) -> None:
        self._memory = memory
        self._clock = clock or SystemClock()
        self._done: list[int] = []
        self._seconds = 0.0

    def keep(self, transfer: Transfer) -> None:
        """Copy now."""
        self._memory.copy(transfer)

    def begin(self, transfers: list[Transfer]) -> None:
        """Copy now."""
        if not transfers:
            return
        started_s = self._clock.now_s()
        for transfer in transfers:
            self._memory.copy(transfer)
            if transfer.transfer_id not in self._done:
                self._done.append(transfer.transfer_id)
        self._seconds += self._clock.now_s() - started_s

    def take_done(self, *, wait: bool) -> tuple[list[int], float]:
        """Return all transfers since the last call."""
        done = self._done, self._seconds
        self._done, self._seconds = [], 0.0
        return done


class StreamTransfers:
    """Copies on a CUDA stream of its own, one after the other.

    A copy starts after all work that is queued on the model's stream: earlier steps have then
    written the blocks that are copied out, and no longer read those that are filled.
    """

    def __init__(self, memory: HostMemory, device: str) -> None:
        self._memory = memory
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._under_way: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def keep(self, transfer: Transfer) -> None:
        """Gather on the model's stream, before it writes; copy on the other stream."""
        staged = self._memory.gather(transfer)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._memory.store(transfer, staged)
        for part in staged:
            part.record_stream(self._stream)

    def begin(self, transfers: list[Transfer]) -> None:
        """Queue the copies behind the queued work of the model."""
        if not transfers:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for transfer in transfers:
                if transfer.transfer_id not in self._under_way:
                    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begun.record(self._stream)
                    self._memory.copy(transfer)
                    ended.record(self._stream)
                    self._under_way[transfer.transfer_id] = begun, ended

    def take_done(self, *, wait: bool) -> tuple[list[int], float]:
        """Return the transfers with a completed event."""
        if wait and self._under_way:
            next(iter(self._under_way.values()))[1].synchronize()
        done = [number for number, (_, ended) in self._under_way.items() if ended.query()]
        pairs = [self._under_way.pop(number) for number in done]
        return done, sum(begun.elapsed_time(ended) for begun, ended in pairs) / 1000


class TransferTable:
    """The transfers with host memory, disk and other engines; None where there is no such tier.

    `keep` runs at the start of a plan, `begin` after its copies; `report` adds ended transfers to
    the result. A host block counts as the block of a key only if that key was copied there last:
    the step that should have copied it may have raised before.
    """

    def __init__(self, host: Transfers | None, disk: DiskTransfers | None) -> None:
        self.host, self.disk = host, disk
        self.peers: PeerTransfers | None = None
        self._keys: dict[tuple[int, int], bytes] = {}
        """(group, host block) → key of the block that was copied there."""
        self._failed: list[int] = []

    def keep(self, plan: StepPlan) -> None:
        """Copy out the blocks that the plan spills; delete the disk blocks of forgotten owners."""
        for transfer in plan.transfers:
            if transfer.is_spill and transfer.peer == HOST:
                assert self.host is not None, "there is no host memory"
                self.host.keep(transfer)
                for block, key in zip(transfer.host_blocks, transfer.keys, strict=True):
                    self._keys[transfer.group, block] = key
            elif transfer.is_spill and transfer.peer == DISK:
                if self.disk is not None:
                    self.disk.keep(transfer)
            elif transfer.is_spill:
                assert self.peers is not None, "no peer engine was named"
                self.peers.keep(transfer)
        for owner in plan.forget if self.disk is not None else ():
            assert self.disk is not None
            self.disk.store.forget(owner)

    def begin(self, transfers: list[Transfer]) -> None:
        """Start all transfers that are not spills, without those in progress."""
        others = [transfer for transfer in transfers if not transfer.is_spill]
        to_host = [transfer for transfer in others if transfer.peer == HOST]
        if to_host:
            assert self.host is not None, "there is no host memory"
            self.host.begin([transfer for transfer in to_host if self._can_copy(transfer)])
        for transfer in others:
            if transfer.peer == DISK:
                assert self.disk is not None, "there is no disk tier"
                self.disk.begin(transfer)
        from_peers = [transfer for transfer in others if transfer.peer.startswith(ENGINE)]
        if from_peers:
            assert self.peers is not None, "no peer engine was named"
            self.peers.begin_all(from_peers)

    def _can_copy(self, transfer: Transfer) -> bool:
        """Return whether host memory holds the blocks of a transfer; else note its failure."""
        places = [(transfer.group, block) for block in transfer.host_blocks]
        if transfer.direction == "out":
            for place in places:
                self._keys.pop(place, None)
            return True
        if not transfer.keys or [self._keys.get(place) for place in places] == transfer.keys:
            return True
        self._failed.append(transfer.transfer_id)
        return False

    def report(self, result: StepResult, *, wait: bool) -> None:
        """Add to `result` what has ended, failed and changed since the last result."""
        failed, self._failed = self._failed, []
        if self.host is not None:
            wait = wait and not failed
            result.transfers_done, result.transfer_s = self.host.take_done(wait=wait)
        for store in (self.disk, self.peers):
            if store is not None:
                wait = wait and not (result.transfers_done or result.transfers_failed)
                done, lost, moved = store.take_done(wait=wait)
                result.transfers_done += done
                result.transfers_failed += lost
                result.moved += moved
        if self.disk is not None:
            result.tier = self.disk.take_news()
        result.transfers_failed += failed


def make_transfers(
    layers: list[KVLayer], num_blocks: tuple[int, ...], device: str
) -> Transfers | None:
    """Return the transfers of a device; None without host blocks. Raises CapacityError."""
    if not num_blocks:
        return None
    on_cuda = device.startswith("cuda")
    memory = HostMemory(layers, num_blocks, pinned=on_cuda)
    return StreamTransfers(memory, device) if on_cuda else DirectTransfers(memory)
