"""KV blocks outside the device: segments on a disk (`disk.py`), moved by transfers."""
