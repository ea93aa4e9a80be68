"""How long KV blocks take from one engine to another of the same machine.

    python benchmarks/handover.py [--tokens 4096] [--repeats 9]

Two processes with the KV memory of Qwen2.5-0.5B in bf16 (12,288 bytes a token, the layout of the
native kernels). One gathers blocks as its steps do, the other pulls them as a restore does: asked,
copied, checked, and written to their places. In turns through shared memory (a Unix socket says
where) and through TCP on the loopback, beside the time of copying as many bytes once.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch

from common import markdown
from headway.core.parcel import peer_of
from headway.core.plan import Transfer
from headway.runtime.attention.cache import KVLayer, allocate_kv
from headway.runtime.attention.native import PairedKVLayer
from headway.runtime.kvstore.handover import Exports, PeerStore
from headway.runtime.kvstore.transfers import PeerTransfers
from headway.runtime.memory import keep_freed
from headway.spec import KVGroupSpec

BLOCK, LAYERS, KV_HEADS, HEAD_DIM = 16, 24, 2, 64
MARK = b"f" * 32
CHUNK_BLOCKS = 32
"""Blocks that leave in a step: a chunk of 512 tokens."""


def memory(num_blocks: int) -> list[KVLayer]:
    """KV memory with other content in each block."""
    group = KVGroupSpec(
        layers=tuple(range(LAYERS)), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=0
    )
    layers = allocate_kv((group,), (num_blocks + 1,), BLOCK, torch.bfloat16, "cpu", PairedKVLayer)
    for number, layer in enumerate(layers):
        for part in layer.parts:
            part.copy_(torch.arange(len(part)).view(-1, *[1] * (part.ndim - 1)) + number)
    return layers


def keys(num_blocks: int) -> list[bytes]:
    return [hashlib.sha256(number.to_bytes(4)).digest() for number in range(num_blocks)]


def parcel_of(number: int) -> bytes:
    return number.to_bytes(16)


def give(addresses: list[str], num_blocks: int, repeats: int) -> None:
    """Who has computed: for each line on stdin all blocks leave in a parcel, step by step."""
    layers, names = memory(num_blocks), keys(num_blocks)
    sides = []
    for address in addresses:
        exports = Exports(address, MARK, limit_bytes=2**30)
        sides.append(PeerTransfers(layers, 1, PeerStore(MARK), exports))
    print(" ".join(side.exports.address for side in sides), flush=True)
    for line in sys.stdin:
        side, number = map(int, line.split())
        longest_s = 0.0
        for first in range(0, num_blocks, CHUNK_BLOCKS):
            began_s = time.perf_counter()
            last = min(first + CHUNK_BLOCKS, num_blocks)
            sides[side].keep(
                Transfer(
                    *(0, 0, list(range(first + 1, last + 1)), "out"),
                    peer_of("", parcel_of(number)),
                    keys=names[first:last],
                    owners=[b"o" * 32] * (last - first),
                )
            )
            longest_s = max(longest_s, time.perf_counter() - began_s)
        print(longest_s, flush=True)


def pull(side: PeerTransfers, address: str, number: int, num_blocks: int) -> float:
    """Seconds until all blocks are in place."""
    blocks = list(range(1, num_blocks + 1))
    transfer = Transfer(
        *(number, 0, blocks, "in", peer_of(address, parcel_of(number))),
        keys=keys(num_blocks),
        limit_s=60.0,
    )
    began_s = time.perf_counter()
    side.begin_all([transfer])
    while True:
        done, failed, _ = side.take_done(wait=True)
        assert not failed, "the blocks did not come"
        if done:
            return time.perf_counter() - began_s


def copied_s(num_bytes: int) -> float:
    """What copying as many bytes once takes, both ends touched before."""
    source, target = (
        torch.ones(num_bytes, dtype=torch.uint8),
        torch.ones(num_bytes, dtype=torch.uint8),
    )
    times = []
    for _ in range(9):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--give", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed()  # as an engine does
    num_blocks = given.tokens // BLOCK
    if given.give:
        give(given.give, num_blocks, given.repeats)
        return
    own = memory(num_blocks)
    truth = [[part.clone() for part in layer.parts] for layer in own]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"--tokens={given.tokens}"]
        command += ["--give", f"unix:{folder}/blocks", "127.0.0.1:0"]
        giver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert giver.stdin is not None and giver.stdout is not None
        addresses = giver.stdout.readline().split()
        taker = PeerTransfers(own, 1, PeerStore(MARK), Exports(f"unix:{folder}/taker", MARK))
        times: list[list[float]] = [[] for _ in addresses]
        gathered: list[float] = []
        for number in range(1, given.repeats + 2):
            for side, address in enumerate(addresses):
                giver.stdin.write(f"{side} {2 * number + side}\n")
                giver.stdin.flush()
                gathered.append(float(giver.stdout.readline()))
                for layer in own:
                    for part in layer.parts:
                        part.zero_()
                times[side].append(pull(taker, address, 2 * number + side, num_blocks))
                for layer, parts in zip(own, truth, strict=True):
                    for part, old in zip(layer.parts, parts, strict=True):
                        assert torch.equal(part[1:], old[1:]), "other bytes than were handed over"
        giver.stdin.close()
        giver.wait()
    num_bytes = taker.block_bytes[0] * num_blocks
    rows = []
    for name, found in zip(["shared memory", "TCP, loopback"], times, strict=True):
        first, rest = found[0], sorted(found[1:])
        rows.append(
            [
                name,
                f"{median(rest) * 1e3:.1f} ({rest[0] * 1e3:.1f} to {rest[-1] * 1e3:.1f})",
                f"{first * 1e3:.1f}",
                f"{num_bytes / median(rest) / 1e9:.2f}",
            ]
        )
    print(
        f"{given.tokens} tokens, {num_bytes / 1e6:.1f} MB; copied once in "
        f"{copied_s(num_bytes) * 1e3:.1f} ms; a step of {CHUNK_BLOCKS * BLOCK} tokens gathers "
        f"for {median(gathered) * 1e3:.1f} ms\n"
    )
    columns = ["through", "ms, median (lowest to highest)", "the first", "GB/s"]
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
