"""Half the bytes with each step from 16 to 8 to 4 bits.

    python benchmarks/claims/quantized_bytes.py

By the memory plan's arithmetic; seconds.
"""

from script import ask

if __name__ == "__main__":
    ask("half-bytes")
