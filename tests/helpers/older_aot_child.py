"""Compiles every form of the kernels with another release of triton; prints what `aot_child.py` prints for sm_90.

    python tests/helpers/older_aot_child.py 3.4 [--every]

Takes a release, whose wheel pip downloads, or a folder that holds the package; options go to `aot_child.py`. Exits with
77 if there is no such wheel.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_AVAILABLE = 77
ARCH = "90"


def installed(release, folder):
    """A folder with that release of triton."""
    if Path(release).is_dir():
        return release
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--target", folder, f"triton=={release}.*"], capture_output=True, text=True)
    if done.returncode:
        print(*done.stderr.splitlines()[-1:], file=sys.stderr)
        sys.exit(NOT_AVAILABLE)
    return folder


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(
            [installed(sys.argv[1], folder), str(Path(__file__).parent.parent.parent), *sys.path[1:]]
        )
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
        command = [sys.executable, str(Path(__file__).parent / "aot_child.py"), ARCH, *sys.argv[2:]]
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
