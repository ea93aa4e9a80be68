"""Damaged headers of safetensors files."""

import json
import random
import struct

ODD_VALUES = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, float("inf"), float("nan"), "",
    "F32", "I8", "F99", "\ud800", [], [1], [0, 0], [5, 1], [0, 2**62], [-4, 0], [None, "x"],
    [float("inf")] * 2, {}, {"dtype": "F32"}, [[[[]]]],
]  # fmt: skip


def mutated(rng: random.Random, header: dict, data: bytes) -> bytes:
    """A file whose header is damaged in one of several ways."""
    header = json.loads(json.dumps(header))
    name = rng.choice([name for name in header if name != "__metadata__"])
    way = rng.randrange(6)
    if way == 0:
        header[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(ODD_VALUES)
    elif way == 1:
        header[name] = rng.choice(ODD_VALUES)
    elif way == 2:
        del header[name][rng.choice(["dtype", "shape", "data_offsets"])]
    elif way == 3:
        header[rng.choice(["__metadata__", "\ud800", "x" * 9, "two\nlines"])] = rng.choice(
            ODD_VALUES
        )
    elif way == 4:
        place = rng.choice(["shape", "data_offsets"])
        header[name][place][rng.randrange(len(header[name][place]))] = rng.choice(ODD_VALUES)
    text = json.dumps(header).encode()
    if way == 5:
        spoiled = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        text = bytes(spoiled)
    return struct.pack("<Q", len(text)) + text + data
