"""KV blocks outside the device: on disk (`disk.py`) and of other engines (`handover.py`), moved by
transfers."""
