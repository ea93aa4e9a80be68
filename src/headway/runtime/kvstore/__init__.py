"""KV blocks on disk (`disk.py`) and of other engines (`handover.py`), moved by transfers."""
