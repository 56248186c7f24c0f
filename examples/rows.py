"""How examples and benchmarks write a table: every row has the commit of the code that made it."""

import csv
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path, about: Mapping[str, Any] = {}) -> None:
    """Write rows as CSV with columns `about` the machine and versions, and the commit, where a row has not its own."""
    last = {**about, "commit": commit()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], *last])), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**last, **row} for row in rows)


def commit() -> str:
    """The commit of this checkout, with a "+" where files differ from it; "" outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/sparsekit_ao", ":/examples/*.py")
        return git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""
