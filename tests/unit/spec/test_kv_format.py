"""Rows of KV formats: their bytes, and what a server plans with them."""

import dataclasses

import pytest

from headway.config.options import Bytes, EngineOptions
from headway.config.resolve import resolve
from headway.core.errors import UsageError
from headway.spec.kv_format import APART, NUMBERS, KVFormat, kv_format
from resolve_cases import GIB, machine, model


@pytest.mark.parametrize(
    ("name", "head_dim", "size"),
    [("float32", 64, 512), ("bfloat16", 64, 256), ("int8", 64, 136), ("int8", 20, 48)],
)
def test_bytes_of_a_token_in_one_head(name: str, head_dim: int, size: int):
    assert kv_format(name).bytes_per_token(head_dim) == size


def test_k_and_v_may_differ():
    mixed = KVFormat(NUMBERS["int8"], NUMBERS["bfloat16"])
    assert mixed.bytes_per_token(64) == 68 + 128
    assert (str(mixed), str(kv_format("int8"))) == ("int8/bfloat16", "int8")


def test_int8_and_int4_apart():
    """K of a head of 64 in int8 takes 68 bytes, V in int4 40; or 36 and 68."""
    for name, size in (("int8/int4", 68 + 40), ("int4/int8", 36 + 68)):
        format = kv_format(name)
        assert (str(format), format.bytes_per_token(64), format.block_size) == (name, size, 64)
    assert APART == ("int8/int4", "int4/int8")


def test_int4_takes_what_its_levels_and_scales_take():
    """64 numbers: K 32 bytes and 64 scales of 4 over 64 tokens, V 32 bytes and 2 scales of 4."""
    int4 = kv_format("int4")
    assert (int4.k.bytes_per_token(64), int4.v.bytes_per_token(64)) == (36, 40)
    assert (int4.block_size, kv_format("int8").block_size, str(int4)) == (64, 0, "int4")


@pytest.mark.parametrize(("name", "of_head"), [("int8/int4", 108), ("int4/int8", 104)])
def test_keys_and_values_apart_take_what_each_takes(name: str, of_head: int):
    """The plan counts both and the open blocks; what is not for int4 is not for them."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    options = EngineOptions(kv_cache_dtype=name, kv_memory=Bytes(GIB))
    settings, _ = resolve(options, native, model())
    heads = 2 * 24
    assert settings.cache.dtype == name and settings.cache.open_blocks
    assert model().kv_bytes_per_token(name) == of_head * heads
    short, _ = resolve(dataclasses.replace(options, kv_memory=Bytes(GIB // 6)), native, model())
    each = 1024 * of_head * heads + 64 * 12288
    assert short.cache.num_blocks[1] - 1 == GIB // 6 // each + 2
    refused = {"block_size": 16, "attention_backend": "sdpa", "kv_read": "25%", "kv_keep": "25%"}
    for option, value in refused.items():
        with pytest.raises(UsageError, match=name if option != "block_size" else "blocks of 64"):
            resolve(dataclasses.replace(options, **{option: value}), native, model())
    odd = dataclasses.replace(model(), head_dim=80)
    with pytest.raises(UsageError, match=f"{name}: heads of 80 .* no whole groups of 32"):
        resolve(options, native, odd)
