"""Philox4x32-10, a counter-based generator (Salmon et al. 2011).

The draw for token 5 of sequence 2 of a request with seed 7 is philox(counter=(5, 2), key=7),
independent of other requests: a seeded request gives the same tokens alone, in any batch, and after
a preemption.
"""

import numpy as np

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
ROUNDS = 10


def philox(counters_R4: np.ndarray, keys_R2: np.ndarray) -> np.ndarray:
    """Return four random 32-bit words for each row, (R, 4), as uint64."""
    x0, x1, x2, x3 = (counters_R4[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys_R2[:, i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> SHIFT) ^ x1 ^ k0,
            product1 & LOW,
            (product0 >> SHIFT) ^ x3 ^ k1,
            product0 & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack((x0, x1, x2, x3), axis=1)


def uniforms(seeds_R: np.ndarray, indices_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) of 53 bits for each (seed, sequence index, token position)."""
    seeds = seeds_R.astype(np.uint64)
    keys = np.stack((seeds & LOW, seeds >> SHIFT), axis=1)
    counters = np.zeros((len(seeds), 4), np.uint64)
    counters[:, 0], counters[:, 1] = positions_R, indices_R
    words = philox(counters, keys)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) / float(1 << 53)
