"""Rows of KV formats: their bytes."""

import pytest

from headway.core.kv_format import NUMBERS, KVFormat, kv_format


@pytest.mark.parametrize(
    ("name", "head_dim", "size"),
    [("float32", 64, 512), ("bfloat16", 64, 256), ("int8", 64, 136), ("int8", 20, 48)],
)
def test_bytes_of_a_token_in_one_head(name: str, head_dim: int, size: int):
    assert kv_format(name).bytes_per_token(head_dim) == size


def test_k_and_v_may_differ():
    mixed = KVFormat(NUMBERS["int8"], NUMBERS["bfloat16"])
    assert mixed.bytes_per_token(64) == 68 + 128
    assert (str(mixed), str(kv_format("int8"))) == ("k=int8,v=bfloat16", "int8")


def test_int4_takes_what_its_levels_and_scales_take():
    """64 numbers: K 32 bytes and 64 scales of 4 over 64 tokens, V 32 bytes and 2 scales of 4."""
    int4 = kv_format("int4")
    assert (int4.k.bytes_per_token(64), int4.v.bytes_per_token(64)) == (36, 40)
    assert (int4.block_size, kv_format("int8").block_size, str(int4)) == (64, 0, "int4")
