"""KV book-keeping: which block belongs to whom. The bytes themselves live in the runtime."""

from headway.engine.kv.cache import KVCache
from headway.engine.kv.pool import BlockPool

__all__ = ["BlockPool", "KVCache"]
