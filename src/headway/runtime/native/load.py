"""Loading the native kernels: only those that prove themselves on small inputs are used.

That no module is there, or that it computes wrongly on this CPU, is a sentence that `describe()`
shows, never an error.
"""

from headway.runtime.native.available import best_instruction_set
from headway.runtime.native.checks import is_right
from headway.runtime.native.library import NativeLibrary


def load(threads: int, instruction_set: str | None = None) -> tuple[NativeLibrary | None, str]:
    """(the library or None, why)."""
    best, why = best_instruction_set()
    if not best:
        return None, why
    from headway.runtime.native import _native

    names = _native.instruction_sets()
    for name in [instruction_set] if instruction_set else names:
        if name not in names:
            return None, f"this CPU does not run {name}"
        try:
            calls = _native.Kernels(name, threads)
            library = NativeLibrary(calls, name, calls.lanes())
            if is_right(library):
                return library, f"compiled for {name}"
        except (AttributeError, TypeError) as error:
            return None, f"the native kernels are of another version ({error}): install again"
    return None, "the native kernels gave a wrong result here"
