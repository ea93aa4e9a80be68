"""What makers print of their accelerators: bandwidth, and dense FLOP/s by type.

Marketing peaks with 2:4 sparsity are twice the dense ones below. A CPU's depends on its memory
slots and clocks, so there is no row for one.
"""

TERA = 1e12
DATASHEETS: list[tuple[str, float, float, float]] = [
    ("B200", 7.7, 2250, 75),
    ("H200", 4.8, 989, 67),
    ("H100 PCIe", 2.0, 756, 51),
    ("H100 NVL", 3.9, 835, 60),
    ("H100", 3.35, 989, 67),
    ("A100-SXM4-40GB", 1.555, 312, 19.5),
    ("A100-PCIE-40GB", 1.555, 312, 19.5),
    ("A100 80GB PCIe", 1.935, 312, 19.5),
    ("A100", 2.039, 312, 19.5),
    ("L40S", 0.864, 362, 91.6),
    ("L40", 0.864, 181, 90.5),
    ("L4", 0.3, 121, 30.3),
    ("A10G", 0.6, 70, 31.2),
    ("A10", 0.6, 125, 31.2),
    ("RTX 4090", 1.008, 165, 82.6),
    ("RTX 3090", 0.936, 71, 35.6),
    ("T4", 0.32, 65, 8.1),
    ("V100", 0.9, 125, 15.7),
]
"""(part of the name, TB/s, dense TFLOP/s in fp16 and bf16, in fp32); the first match counts."""


def datasheet(name: str, dtype: str) -> tuple[float | None, float | None]:
    """(bytes/s, FLOP/s in `dtype`) of a device by its name, (None, None) for an unknown one."""
    for part, bandwidth, half, single in DATASHEETS:
        if part in name:
            return bandwidth * TERA, (single if dtype == "float32" else half) * TERA
    return None, None
