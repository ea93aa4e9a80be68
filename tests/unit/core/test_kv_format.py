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
