"""KV bytes: 54 GB for 13B, 3 TB for 500B, a window's tenth, twenty times fewer.

    python benchmarks/claims/kv_bytes.py

By the memory plan's arithmetic; seconds.
"""

from script import ask

if __name__ == "__main__":
    ask("kv-13b", "kv-500b", "kv-window", "kv-twenty")
