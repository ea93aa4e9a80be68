"""Allocate memory of the system: huge pages for weights, and reuse of freed memory for logits."""

import contextlib
import ctypes
import mmap
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_HEAP_ALLOCATION_BYTES, MAX_FREE_HEAP_BYTES = 32 * 2**20, 256 * 2**20
"""The first is the largest threshold that glibc accepts."""
HUGE_PAGE = 1 << 21
MADV_COLLAPSE = 25


def zeros(num_bytes: int) -> mmap.mmap:
    """Return zeros, at least one; a page takes memory when it is first touched.

    They are huge pages where the system has them: a decode step of batch 1 reads weights in huge
    pages 12% faster. Raises OSError (ENOMEM) where the system refuses the size.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def gives_huge_pages() -> bool:
    """Return whether touched `zeros` are huge pages, by a test of one.

    One byte is written, and all 512 pages around it have to be resident. Settings of the system and
    of the process (prctl) and the fragmentation of memory decide, and no file states them all.
    Raises OSError, as `zeros`.
    """
    if sys.platform != "linux":
        return False
    memory = zeros(2 * HUGE_PAGE)
    window = (ctypes.c_char * len(memory)).from_buffer(memory)
    begin = -(-ctypes.addressof(window) // HUGE_PAGE) * HUGE_PAGE
    ctypes.c_char.from_address(begin).value = b"1"
    is_resident = (ctypes.c_ubyte * (HUGE_PAGE // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(HUGE_PAGE), is_resident)
    return not failed and all(page & 1 for page in is_resident)


def collapse(memory: memoryview) -> None:
    """Move memory that begins at a page into huge pages.

    Where the system does not support that, nothing is raised, and a step of one sequence takes some
    percent longer.
    """
    if not memory:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), advice)


def keep_freed() -> None:
    """Let glibc reuse freed memory in place of returning it to the system.

    Each step that samples in torch allocates and frees logits, 19 MB for 32 rows in fp32. With
    fresh pages, which the system has to clear, a step takes 3 to 7% longer (Qwen2.5-0.5B, int8).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_ALLOCATION_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)
