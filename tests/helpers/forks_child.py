"""Kills runs and limits their resources, in forks of this process; run by test_faults.py as `python -O -W error`.

python -O -W error tests/helpers/forks_child.py [kills of each kind of run]
"""

import pathlib
import sys
import tempfile

import killed
import limited


def main(kills):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        count = killed.kill(folder, kills)
        for fault in limited.FAULTS:
            limited.run(fault, kills)
    print(f"{count} of {kills * len(killed.KINDS)} runs were killed in the middle; all is whole")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
