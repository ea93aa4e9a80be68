"""Find the native kernels that run on this machine, without torch."""

from pathlib import Path

OPERATION_BYTES = 304
"""Size of `Operation` in native/program.h; it differs in a module of another version."""
GROUP_BYTES = 32
"""Size of `KVGroup` in native/program.h."""
NUM_CODES = 11
"""Number of kinds of operations."""


def compiled_module() -> Path:
    """Return the file of the compiled kernels; only if `best_instruction_set` names one."""
    from headway.runtime.native import _native

    return Path(_native.__file__)


def best_instruction_set() -> tuple[str, str]:
    """Return (name, reason), the name one of amx, avx512, avx2 …, "" without native kernels.

    The module may be missing (no compiler at install) or may not load (built for another machine).
    """
    try:
        from headway.runtime.native import _native
    except ImportError as error:
        compiled = any(Path(__file__).parent.glob("_native*.so"))
        why = str(error)[:200] if compiled else "not compiled at install; is there a C++ compiler?"
        return "", f"the native kernels are not there ({why})"
    names = ("operation_bytes", "group_bytes", "num_codes")
    if tuple(getattr(_native, name, 0) for name in names) != (
        OPERATION_BYTES,
        GROUP_BYTES,
        NUM_CODES,
    ):
        return "", "the native kernels are of another version; install Headway again"
    name = _native.instruction_sets()[0]
    return name, f"compiled for {name}, the best that this CPU runs"
