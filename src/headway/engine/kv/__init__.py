"""KV book-keeping: which sequence owns which block. The bytes are in the runtime."""

from headway.engine.kv.cache import KVCache
from headway.engine.kv.pool import BlockPool

__all__ = ["BlockPool", "KVCache"]
