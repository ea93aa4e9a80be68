"""Which settings `/stats` tells: those that change what a step costs and who runs in it."""

TOLD = {
    "device": "device",
    "dtype": "dtype",
    "kv_dtype": "cache.dtype",
    "quantization": "quantization",
    "kernels": "kernels",
    "attention_backend": "attention_backend",
    "threads": "threads",
    "prefix_cache": "cache.prefix_cache",
    "kv_read": "cache.read",
    "kv_keep": "cache.kept",
    "tensor_parallel_size": "parallel.size",
    "pipeline_parallel_size": "parallel.told_stages",
    "decode_context_parallel_size": "parallel.context",
    "batching": "scheduler.batching",
    "policy": "scheduler.policy",
    "speculate": "speculation.named",
    "max_drafts": "speculation.max_drafts",
}
"""Name in `/stats` → where it is in the settings."""
