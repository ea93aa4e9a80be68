"""Compiles the native kernels when the package is built or installed, also in place with `-e`.

Without a C++ compiler the package is still whole: torch computes, numpy learns what steps cost, and
`headway doctor` says why. Such a wheel is none to publish: `make dist` refuses it.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OUTPUTS = "src/headway/runtime/native/_native*.so", "src/headway/perf/_learning*.so"


class NativeBuildHook(BuildHookInterface):
    """Runs CMake on native/ and adds the modules to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" or "editable"."""
        root = Path(self.root)
        build = root / "build" / "native"
        configure = ["cmake", "-S", str(root / "native"), "-B", str(build), "-G", "Ninja"]
        configure += ["--fresh", f"-DPython_EXECUTABLE={sys.executable}"]
        for stale in [path for pattern in OUTPUTS for path in root.glob(pattern)]:
            stale.unlink()
        try:
            self._run(configure)
            self._run(["cmake", "--build", str(build)])
        except (OSError, subprocess.CalledProcessError) as error:
            told = error.output[-2000:] if isinstance(error, subprocess.CalledProcessError) else ""
            self.app.display_warning(f"The native kernels were not compiled: {error}\n{told}")
            return
        build_data["pure_python"] = False
        # the modules keep to Python's limited API of 3.11: one wheel for it and all later ones
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"

    def _run(self, command: list[str]) -> None:
        subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
