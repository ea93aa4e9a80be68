"""A datasheet file: one accelerator a line, as a CSV with a header. Given as a path, never copied.

Columns that are read: accelerator, mem_gb, mem_bw_gbs, bf16_dense_tflops, fp8_dense_tflops,
int8_dense_tops, price_usd_per_hr_mid.
"""

import csv
import re
from pathlib import Path

import msgspec

from headway.core.errors import UsageError
from headway.core.regular_file import open_text


class Sheet(msgspec.Struct, kw_only=True):
    """What the maker prints; None where the file has nothing."""

    name: str
    memory_gb: float | None
    bandwidth_gb_per_s: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    usd_per_hour: float | None


COLUMNS = {
    "memory_gb": "mem_gb",
    "bandwidth_gb_per_s": "mem_bw_gbs",
    "bf16_tflops": "bf16_dense_tflops",
    "fp8_tflops": "fp8_dense_tflops",
    "int8_tops": "int8_dense_tops",
    "usd_per_hour": "price_usd_per_hr_mid",
}


def read_sheets(path: str) -> list[Sheet]:
    """Every row; UsageError when the file is not one."""
    try:
        with open_text(Path(path), newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--accelerators {path}: {error}.", "Check the path.") from error
    if not rows or "accelerator" not in rows[0]:
        raise UsageError(
            f"--accelerators {path}: there is no column accelerator.",
            f"Columns that are read: accelerator, {', '.join(COLUMNS.values())}.",
        )
    return [
        Sheet(
            name=row["accelerator"],
            **{field: number(row.get(column)) for field, column in COLUMNS.items()},
        )
        for row in rows
    ]


def number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def sheet_of(device: str, sheets: list[Sheet], memory_gb: float) -> Sheet | None:
    """The row whose name shares most words with the device's, then the nearest memory.

    "NVIDIA H100 80GB HBM3" finds H100-SXM5-80GB; "AMD EPYC 7763" finds nothing.
    """
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    scored = []
    for sheet in sheets:
        named = re.findall(r"[a-z0-9]+", sheet.name.lower())
        if named and named[0] in words:
            far = abs((sheet.memory_gb or 0.0) - memory_gb)
            scored.append((-len(words & set(named)), far, sheet.name, sheet))
    return min(scored)[-1] if scored else None
