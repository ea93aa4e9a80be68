"""Memory from the system: for what is large and lives long, and kept for what comes and goes."""

import contextlib
import ctypes
import mmap
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_HEAP_ALLOCATION_BYTES, MAX_FREE_HEAP_BYTES = 32 * 2**20, 256 * 2**20
"""The first is the largest that glibc takes."""
HUGE_PAGE = 1 << 21
MADV_COLLAPSE = 25


def zeros(num_bytes: int) -> mmap.mmap:
    """So many zeros, at least one; a page takes memory when it is first touched.

    They come in huge pages where the system has them: reading weights so, a decode step of batch 1
    is 12% faster. Raises OSError (ENOMEM) when the system would never give so much.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def gives_huge_pages() -> bool:
    """Whether `zeros` that are touched come in huge pages, as far as one of them tells.

    A byte is written, and all 512 pages around it have to be there. The system's settings, the
    process's own (prctl) and what memory is left in one piece decide, and no file tells them all.
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
    """Bring what lies in memory, from the beginning of a page on, into huge pages.

    Raises nothing where the system does not do that: a step of one sequence takes some percent
    longer then.
    """
    if not memory:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), advice)


def keep_freed() -> None:
    """Have the C library keep what is freed for what comes next, where that is glibc.

    Logits of 32 rows in fp32, 19 MB, come and go with each step that samples in torch. From fresh
    pages, which the system clears and takes back, it takes 3 to 7% more (Qwen2.5-0.5B, int8).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_ALLOCATION_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)
