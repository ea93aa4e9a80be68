"""Resources of this machine: cores, free memory, instruction sets, an accelerator.

It reads /proc and the cgroup files, so a container's limit counts and not the host's memory. On a
system without them it falls back to what Python knows.
"""

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
KERNELS_UNKNOWN = "native kernels were not looked for"
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MULTIPLY_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16"},
    "float16": {"avx512_fp16", "amx_fp16"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU as the runtime reports it; bytes.

    `has_kernels` says whether Headway's own kernels run there, and `kernels_why` why, or with what;
    `has_flashinfer` whether FlashInfer is installed.
    """

    name: str
    total_bytes: int
    free_bytes: int
    has_kernels: bool = False
    kernels_why: str = "our own kernels were not looked for"
    has_flashinfer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Usable cores, bytes of RAM in all and free, CPU flags such as `avx2`, `avx512_bf16`.

    `native` is the instruction set of the native kernels; "" without them, and `native_why` says
    why.
    """

    num_cores: int
    total_bytes: int
    free_bytes: int
    cpu_flags: frozenset[str] = frozenset()
    accelerator: Accelerator | None = None
    native: str = ""
    native_why: str = KERNELS_UNKNOWN

    def multiplies(self, dtype: str) -> bool:
        """Return whether the CPU multiplies this type natively: bf16 needs AVX-512 bf16 or AMX."""
        needed = MULTIPLY_FLAGS.get(dtype)
        return needed is None or bool(self.cpu_flags & needed)


def probe_machine(
    accelerator: Accelerator | None = None, native: tuple[str, str] = ("", KERNELS_UNKNOWN)
) -> Machine:
    """Read this machine now; `native` is the native kernels' instruction set, and why."""
    total, free = memory()
    return Machine(
        num_cores=num_cores(),
        total_bytes=total,
        free_bytes=free,
        cpu_flags=cpu_flags(),
        accelerator=accelerator,
        native=native[0],
        native_why=native[1],
    )


def num_cores() -> int:
    """Return the cores of the affinity mask, or of a smaller cgroup quota: 150000/100000 → 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = read_text(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores or 1, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores or 1)


def memory() -> tuple[int, int]:
    """Return (total, free) bytes: the smaller of /proc/meminfo and the cgroup's limit minus use."""
    fields = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    page = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total, free = fields.get("MemTotal", page), fields.get("MemAvailable", page // 2)
    for limit_path, used_path in (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes"),
    ):
        limit, used = read_text(limit_path).strip(), read_text(used_path).strip()
        if limit.isdigit() and used.isdigit():
            total = min(total, int(limit))
            free = min(free, max(0, int(limit) - int(used)))
    return total, free


def cpu_flags() -> frozenset[str]:
    """Return the CPU's flags from /proc/cpuinfo; empty without it."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def last_level_cache_bytes() -> int:
    """Return the bytes of the largest cache of the first core; 0 if unknown."""
    sizes = [read_text(path).strip() for path in CACHES.glob("index*/size")]
    sizes_bytes = [int(s[:-1]) * CACHE_UNITS[s[-1]] for s in sizes if s and s[-1] in CACHE_UNITS]
    return max(sizes_bytes, default=0)


def cache_share_bytes() -> int:
    """Return the part of that cache for these cores: a virtual machine reports the whole socket's.

    Two cores that report 480 MiB, 240 each, have 32: no core has more than 12 of its own.
    """
    return min(last_level_cache_bytes(), (os.cpu_count() or 1) * MAX_CACHE_BYTES_PER_CORE)


MAX_CACHE_BYTES_PER_CORE = 16 * 2**20
"""Upper bound of a core's part of an L3 cache."""
CACHE_UNITS = {"K": 2**10, "M": 2**20}


def processor_name() -> str:
    """Return the CPU's name from /proc/cpuinfo; "" without it."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def read_text(path: Path) -> str:
    """Return the file's text, or "" if it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
