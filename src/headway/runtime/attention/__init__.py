"""Attention over paged KV: one backend a file, chosen by the name a user types."""

from headway.runtime.attention.cache import KVLayer, allocate_kv
from headway.runtime.attention.protocol import AttentionBackend, AttentionRule
from headway.runtime.attention.reference import ReferenceAttention
from headway.runtime.attention.sdpa import SdpaAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceAttention,
    "sdpa": SdpaAttention,
}

__all__ = ["BACKENDS", "AttentionBackend", "AttentionRule", "KVLayer", "allocate_kv"]
