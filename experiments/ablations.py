"""
Train a grid of systems × seeds, one run a line in experiments/results/runs.jsonl, to compare them in pairs.

    python experiments/ablations.py systems --jobs=2        run a grid, or go on with it: finished runs are kept
    python experiments/ablations.py systems --seeds=1 --quick   a few steps of each: only shows that it runs
    python experiments/report.py                            tables and figures from the lines

A seed fixes the start and the batches of all systems, so systems are compared within a seed. Every run is
`train.train` on one thread; the loss is the mean over the whole validation split. Grids share runs: what one of them
has trained, another one does not train again.
"""

import argparse
import ast
import csv
import hashlib
import io
import json
import math
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import numpy
import torch
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import exoformer  # noqa: E402
import train  # noqa: E402
from data.prepare import UserError, load, replacing  # noqa: E402
from exoformer import VARIANTS, Config, ExoFormer  # noqa: E402

try:
    import fcntl
except ImportError:                         # Windows: lines are written in one piece, without a lock
    fcntl = None

RESULTS = ROOT / "experiments" / "results"
RUNS = RESULTS / "runs.jsonl"

# 97.5 % quantiles of Student's t by degrees of freedom, for 95 % intervals of paired differences
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306,
              9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131}

# Flags of train.py that all runs of a size share. About 0.8M parameters, and about 3M
SMALL = dict(preset="shakespeare-cpu", max_iters=300, warmup_iters=20, decay_share=0.4, muon_lr=0.01, adamw_lr=0.006,
             momentum=0.95, eval_interval=75, eval_iters=0)
LARGE = dict(preset="cpu", max_iters=500, eval_interval=125, eval_iters=512)
QUICK = dict(dataset="pystdlib", max_iters=4, warmup_iters=2, eval_interval=2, eval_iters=4, n_layer=2, n_embd=32,
             batch_size=2)


# --- Grids: {what the tables call a row: flags that differ from the size's} -------------------------
def rows(variants: list[str], **choices) -> dict[str, dict]:
    """Each variant with each value of the one axis in `choices`."""
    (axis, values), = choices.items()
    return {f"{variant}, {axis} {value}": dict(variant=variant, **{axis: value})
            for variant in variants for value in values}


TRIO = ["gated", "exoformer", "exoformer-dynamic"]
BOTH = ["nuresformer", "exoformer"]
RATES = {"half Muon": dict(muon_lr=0.005), "twice Muon": dict(muon_lr=0.02), "half AdamW": dict(adamw_lr=0.003),
         "twice AdamW": dict(adamw_lr=0.012), "twice both": dict(muon_lr=0.02, adamw_lr=0.012), "as elsewhere": {}}

GRIDS = {
    "systems": {variant: dict(variant=variant) for variant in VARIANTS},
    "matched": {variant: dict(variant=variant, matched=True) for variant in VARIANTS},
    "rates": {f"{variant}, {name}": dict(variant=variant, **rates)
              for variant in TRIO for name, rates in RATES.items()},
    "granularity": rows(BOTH, granularity=["elementwise", "headwise", "scalar"]),
    "anchor-norm": rows(BOTH, anchor_norm=["none", "qk", "qkvg"]),
    "post-norm": rows(["exoformer"], post_norm=["qk", "qkv", "qkvg"]),
    "source": rows(["exoformer", "exoformer-dynamic"], anchor_layer=[0, 1, 2]),
    "components": rows(["exoformer"], mix=["qkvg", "vg", "q", "k", "v", "g"]),
    "control": {f"{variant}, empty anchors": dict(variant=variant, empty=True) for variant in TRIO[1:]},
    "budget": {f"{variant}, gated's {what}": dict(variant=variant, cheaper=what)
               for variant in TRIO[1:] for what in ("FLOPs", "time")},
    "large": {variant: dict(variant=variant) for variant in TRIO}
             | {"exoformer-dynamic, empty anchors": dict(variant="exoformer-dynamic", empty=True)},
}
TIME = {"exoformer": 1.15, "exoformer-dynamic": 1.27}       # of a step, of gated's: cost.py --size=small, one thread
MAX_SEEDS = 16
SEEDS = dict.fromkeys(GRIDS, 8) | dict(systems=MAX_SEEDS, matched=MAX_SEEDS, large=4)
AXES = ("granularity", "anchor_norm", "post_norm", "anchor_layer", "mix")


def flags_of(grid: str, row: str, seed: int, quick: bool) -> dict:
    """The flags of one run: train.py's, and `width` where the feed-forward is wider than 2d."""
    return flags_of_row(grid, row, quick) | dict(seed=seed)


@cache
def flags_of_row(grid: str, row: str, quick: bool) -> dict:
    size = LARGE if grid == "large" else SMALL
    preset = train.PRESETS[size["preset"]]      # spelled out: if it changes one day, that is another run
    flags = preset | size | GRIDS[grid][row] | (QUICK if quick else {})
    config = Config.variant(flags["variant"], **of_model(flags))
    if flags.pop("matched", False) and (width := matched_width(config)):
        flags["width"] = width
    if "cheaper" in flags:
        price = TIME[flags["variant"]] if flags.pop("cheaper") == "time" else flops_ratio(config)
        flags["max_iters"] = round(flags["max_iters"] / price)
    without_axes = {name: value for name, value in flags.items() if name not in AXES}
    if config == Config.variant(flags["variant"], **of_model(without_axes)):
        return without_axes                     # the axis has the value that the system has anyway: it is the same run
    return flags | {name: value for name, value in asdict(config).items() if name in flags}


def of_model(flags: dict) -> dict:
    return {name: value for name, value in flags.items() if name in train.MODEL_FLAGS}


# --- Equal parameters ------------------------------------------------------------------------------
class WideSwiGLU(exoformer.SwiGLU):
    """SwiGLU of any width, instead of 2d."""

    def __init__(self, config: Config, width: int):
        super().__init__(config)
        d = config.n_embd
        self.W_gate, self.W_up = nn.Linear(d, width, bias=False), nn.Linear(d, width, bias=False)
        self.W_down = nn.Linear(width, d, bias=False)


def widened(width: int | None):
    """Within it, ExoFormer is built with feed-forwards of this width; None is 2d."""
    return patch.object(exoformer, "SwiGLU", partial(WideSwiGLU, width=width)) if width else nullcontext()


@cache
def matched_width(config: Config) -> int | None:
    """The width of the feed-forward that brings a system's parameters nearest to the largest system's."""
    sizes = dict(n_layer=config.n_layer, n_embd=config.n_embd, n_head=config.n_head)
    largest = max(meta_model(Config.variant(variant, **sizes)).num_params()[0] for variant in VARIANTS)
    own = meta_model(config).num_params()[0]
    more = round((largest - own) / (config.n_layer * 3 * config.n_embd))    # three matrices in a layer
    return 2 * config.n_embd + more if more else None


def emptied():
    """Within it, exogenous anchors are made from ones instead of H_k: as many parameters, and no token in them."""
    exogenous = exoformer.Anchor.exogenous
    return patch.object(exoformer.Anchor, "exogenous", lambda self, H_k: exogenous(self, torch.ones_like(H_k)))


def meta_model(config: Config) -> ExoFormer:
    """A model without memory, to be counted."""
    with torch.device("meta"), patch.object(ExoFormer, "init_weights", lambda *_: None):
        return ExoFormer(config)


def flops_ratio(config: Config) -> float:
    """FLOPs per token of this config, of gated's."""
    gated = replace(config, anchor="none", dynamic=False)
    return meta_model(config).flops_per_token() / meta_model(gated).flops_per_token()


# --- Pairs -----------------------------------------------------------------------------------------
def half_width(differences: list[float]) -> float:
    """Of the 95 % interval of the mean (Student's t)."""
    n = len(differences)
    return T_QUANTILE[n - 1] * stdev(differences) / math.sqrt(n) if n > 1 else math.inf


def interval(differences: list[float], digits: int = 4) -> str:
    """Mean and 95 % interval of paired differences; one difference alone has none."""
    half = f" ± {half_width(differences):.{digits}f}" if len(differences) > 1 else ""
    return f"{mean(differences):+.{digits}f}{half}"


def paired(runs: dict[int, float], reference: dict[int, float]) -> list[float]:
    """Differences within the seeds that both have."""
    return [runs[seed] - reference[seed] for seed in sorted(runs.keys() & reference.keys())]


def lower_in(differences: list[float]) -> str:
    return f"{sum(d < 0 for d in differences)} of {len(differences)}"


def spread(values: list[float]) -> str:
    return f"{stdev(values):.4f}" if len(values) > 1 else ""


# --- One run ---------------------------------------------------------------------------------------
def source_hash() -> str:
    """Of the code that trains, as Python reads it: comments, docstrings and spacing are not in it."""
    digest = hashlib.sha256()
    for name in ("exoformer.py", "train.py", "data/prepare.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:12]


# Code whose runs are those of older code to the last bit, so that these count: since then shards, z-loss and the
# paper's presets came, none of which these grids use. Five committed runs were repeated, with the same losses.
ALIKE = {"785b80c3615e": "1ebe884f1fd6"}
SOURCE = ALIKE.get(source_hash(), source_hash())        # of what this process runs, whatever becomes of the files


def run(grid: str, row: str, flags: dict, keep: Path | None) -> dict:
    """Train once. Returns the run's line; `keep` is a file for its last checkpoint."""
    flags, own = dict(flags), flags                 # `own` with what train.py has no flag for
    width, empty = flags.pop("width", None), flags.pop("empty", False)
    with tempfile.TemporaryDirectory() as out:
        quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with widened(width), emptied() if empty else nullcontext(), quiet[0], quiet[1]:
            train.train(flags | dict(out_dir=out, max_new_tokens=0))
            checkpoint, model = train.load_checkpoint(Path(out) / "last.pt")
        if keep:
            with replacing(keep) as file:
                file.write((Path(out) / "last.pt").read_bytes())
        with open(Path(out) / "log.csv", newline="") as file:
            log = list(csv.DictReader(file))
    options = checkpoint["options"]
    losses = {int(at["step"]): float(at["val_loss"]) for at in log if at["val_loss"]}
    return dict(
        grid=grid, row=row, seed=flags["seed"], final=losses[options["max_iters"]], losses=losses,
        grad_norms=[round(float(at["grad_norm"]), 4) for at in log], seconds=round(checkpoint["seconds"], 1),
        tokens=checkpoint["step"] * options["batch_size"] * model.config.block_size,
        parameters=model.num_params()[0], flops_per_token=model.flops_per_token(), width=width, empty=empty,
        options={name: value for name, value in options.items() if name not in ("out_dir", "seed")},
        config=checkpoint["config"], data={split: checkpoint["data"][split] for split in ("train", "val")},
        versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=numpy.__version__),
        source=SOURCE, key=key(own, checkpoint["data"]))


def key(flags: dict, data: dict) -> str:
    """What makes two runs the same: flags and data."""
    text = json.dumps([sorted((name, value) for name, value in flags.items() if value is not None),
                       data["train"], data["val"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- The file of runs --------------------------------------------------------------------------------
def read(path: Path = RUNS) -> dict[str, dict]:
    """{key: run}, the last of equal ones. Lines that are no runs, as one torn by a power cut, are left out."""
    return {run["key"]: run for run in read_lines(path) if run.keys() >= {"key", "source", "final", "options", "data"}}


def read_lines(path: Path) -> list[dict]:
    """The objects of a file of JSON lines; [] if there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return [line for line in found if isinstance(line, dict)]


def append(path: Path, line: dict) -> None:
    """In one piece, though other processes write to the file too; below a torn line, not behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        torn = file.tell() > 0
        if torn:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def watch_parent() -> None:
    """In a process of side_by_side: end with the main process, even if that one is killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def side_by_side(function, work: dict, jobs: int) -> Iterator[tuple]:
    """Yields (name, function(*arguments)) of each in `work`, as they are done: one thread each, `jobs` at a time."""
    if jobs == 1:
        torch.set_num_threads(1)
        yield from ((name, function(*arguments)) for name, arguments in work.items())
        return
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), watch_parent)
        try:
            running = {pool.submit(function, *arguments): name for name, arguments in work.items()}
            yield from ((running[job], job.result()) for job in as_completed(running))
        finally:
            pool.shutdown(cancel_futures=True)


def finished(path: Path) -> set[str]:
    """Keys of the runs that today's code has made: whoever changes the model trains anew."""
    return {name for name, run in read(path).items() if run["source"] == SOURCE}


def unless_done(path: Path, name: str, grid: str, row: str, flags: dict, keep: Path | None) -> None:
    """Train once and append the line, if no other process has done it meanwhile."""
    done = name in finished(path)
    if not done or keep and not keep.exists():
        line = run(grid, row, flags, keep)
        if not done:
            append(path, line)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("ablations.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", choices=GRIDS, metavar="GRID", help=", ".join(GRIDS))
    parser.add_argument("--seeds", type=int,
                        help="1 to this one (default: 16 of systems and matched, 4 of large, else 8)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each (default: 1)")
    parser.add_argument("--only", help="of a grid, the rows whose names hold this text")
    parser.add_argument("--dataset", help="instead of the size's own")
    parser.add_argument("--keep", type=Path, help="a folder for the last checkpoint of each run, for diagnostics.py")
    parser.add_argument("--out", type=Path, default=RUNS,
                        help="the file of lines (default: experiments/results/runs.jsonl)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    args = parser.parse_args(argv)
    for name, high in (("seeds", MAX_SEEDS), ("first", MAX_SEEDS), ("jobs", 64)):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= high:
            parser.error(f"--{name}={getattr(args, name)}: expected 1 to {high}")
    try:
        return run_grids(args)
    except (UserError, OSError, BrokenProcessPool) as error:
        print(f"ablations.py: {error}", file=sys.stderr)
        return 2


def run_grids(args) -> int:
    path = args.out.expanduser().resolve()
    if args.quick and path == RUNS:
        path = Path(tempfile.mkdtemp()) / "runs.jsonl"
    if path.suffix != ".jsonl":
        raise UserError(f"--out={args.out}: expected a file whose name ends in .jsonl")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    done, todo = finished(path), {}
    for seed in range(args.first, 1 + (args.seeds or MAX_SEEDS)):        # seed by seed: an unfinished grid is even
        for grid in args.grids:
            for row in GRIDS[grid] if seed <= (args.seeds or SEEDS[grid]) else ():
                if (args.only or "") in row:
                    flags = flags_of(grid, row, seed, args.quick)
                    flags |= dict(dataset=args.dataset) if args.dataset else {}
                    data, *_ = load(flags.get("dataset", train.Options.dataset), flags["block_size"])
                    keep = args.keep and args.keep / f"{grid}, {row}, seed {seed}.pt"
                    todo.setdefault(key(flags, data), (grid, row, flags, keep))
    if not todo:
        raise UserError("no run is asked for: see --only, --first and --seeds")
    for name, (*_, keep) in todo.items():
        if name not in done and keep and keep.exists():
            raise UserError(f"{keep} is of another run: name another folder, --keep={args.keep} would replace it")
    missing = {name: (path, name, *job) for name, job in todo.items()
               if name not in done or job[-1] and not job[-1].exists()}
    with tqdm(total=len(todo), initial=len(todo) - len(missing), disable=None) as bar:
        try:
            for _ in side_by_side(unless_done, missing, args.jobs):
                bar.update()
        except (KeyboardInterrupt, SystemExit):
            print(f"stopped; finished runs are in {path}, the same command goes on", file=sys.stderr)
            return 130
    print(f"{len(todo)} runs are in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
