"""
Run a lesson of the README: train before and after its one-line change, several seeds of each, and compare in pairs.

    python experiments/lesson.py 1              lesson 1, four seeds, one and a half to three minutes on two cores
    python experiments/lesson.py 1 --quick      a few steps: only shows that it runs

The change is applied to a copy in memory, never to your exoformer.py. The same seed means the same batches and the
same start on both sides, so that a seed's difference is the change's. Two runs go side by side, one thread each.
"""

import argparse
import io
import json
import re
import sys
import tempfile
import types
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch
import torch.nn.functional as F
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from ablations import BrokenProcessPool, RESULTS, interval, lower_in, read_lines, side_by_side  # noqa: E402
from data.prepare import Split, UserError, load, replacing  # noqa: E402

FLAGS = dict(preset="shakespeare-cpu", max_iters=100, eval_interval=100)
QUICK = dict(dataset="pystdlib", max_iters=3, eval_iters=4, n_layer=2, n_embd=32)
LOSS, SHARE, CACHED = "loss", "v's anchor in layer 1, share by norm", "loss, token by token with the cache"
SYSTEMS = {1: ("gated", "exoformer-dynamic"), 3: ("exoformer",)}       # the lessons not about exoformer-dynamic alone
SHOWN = {6: (LOSS, SHARE), 8: (LOSS, CACHED)}           # the lessons whose outcome the loss alone does not tell


def lessons() -> list[tuple[str, str, str]]:
    """(title, line to change, changed line) of each lesson in the README. Raises UserError if there is none."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^# \d\. (.*?)\. .*(?:\n# .*)*\n-(.*)\n\+(.*)$", readme, re.M)
    if not found:
        raise UserError("README.md: no lessons found, expected '# 1. Title. Text', -, +")
    return found


def source() -> str:
    return (ROOT / "exoformer.py").read_text(encoding="utf-8")


def changed_exoformer(old: str, new: str, text: str) -> types.ModuleType:
    """exoformer.py, whose text is given, as a module with one piece changed. UserError unless that is there once."""
    if old and text.count(old) != 1:
        raise UserError(f"{old.strip()!r} stands {text.count(old)} times in exoformer.py: expected once, bring "
                        "that line back or adapt the lesson in README.md")
    module = types.ModuleType("exoformer")
    exec(compile(text.replace(old, new), "exoformer.py", "exec"), module.__dict__)
    return module


@torch.no_grad()
def cached_loss(model, val: Split) -> float:
    """The loss of 32 windows, each fed token by token through the K/V cache, as in generation."""
    x, y = (torch.from_numpy(ids) for ids in next(val.fixed(32, 32)))
    cache = model.new_cache()
    logits = torch.cat([model(token, cache=cache)[0] for token in x.split(1, dim=1)], dim=1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def run(old: str, new: str, text: str, flags: dict) -> dict:
    """Train once, with `old` in exoformer.py's text changed to `new`. Returns what is measured."""
    module = changed_exoformer(old, new, text)
    with (tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()),
          patch.multiple(train, Config=module.Config, ExoFormer=module.ExoFormer)):
        loss = train.train(flags | dict(out_dir=out, max_new_tokens=0))
        checkpoint, model = train.load_checkpoint(Path(out) / "last.pt")
    model.eval()
    _, _, val = load(flags.get("dataset", checkpoint["options"]["dataset"]), model.config.block_size)
    measures = {LOSS: loss, CACHED: cached_loss(model, val)}
    if model.anchor is not None:
        measures[SHARE] = train.anchor_shares(model, torch.from_numpy(next(val.fixed(8, 8))[0]))[1]["v"]
    return measures


def table(number: int, title: str, measured: dict[str, dict[str, list[dict]]]) -> str:
    """{variant: {"before": one dict of measures a seed, "after": ...}} as Markdown."""
    rows = [f"| {number}. {title} | before | after | difference, 95 % interval | lower in |", "|---|---|---|---|---|"]
    for variant, sides in measured.items():
        for name in SHOWN.get(number, (LOSS,)):
            before, after = ([of[name] for of in sides[side]] for side in ("before", "after"))
            differences = [b - a for a, b in zip(before, after)]
            rows.append(f"| `{variant}`, {name} | {mean(before):.3f} | {mean(after):.3f} | {interval(differences, 3)} "
                        f"| {lower_in(differences)} |")
    return "\n".join(rows)


def measure(number: int, seeds: int, jobs: int, extra: dict) -> dict:
    """The lesson's line: what `table` takes, by name."""
    (title, old, new), text = lessons()[number - 1], source()      # read once: you may go on editing
    changed_exoformer(old, new, text)                               # or one clear line before any process starts
    todo = {}
    for variant in SYSTEMS.get(number, ("exoformer-dynamic",)):
        for seed in range(1, 1 + seeds):
            for side, change in (("before", ("", "")), ("after", (old, new))):
                todo[variant, side, seed] = *change, text, FLAGS | dict(variant=variant, seed=seed) | extra
    found = dict(tqdm(side_by_side(run, todo, jobs), total=len(todo), disable=None))
    measured = {}
    for variant, side, _ in todo:
        measured.setdefault(variant, {}).setdefault(side, [])
    for name in todo:
        measured[name[0]][name[1]].append(found[name])
    return dict(number=number, title=title, change=[old, new], flags=FLAGS | extra, measured=measured)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("lesson.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="of the lesson in the README")
    parser.add_argument("--seeds", type=int, default=4, help="1 to this one (default: 4)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each (default: 2)")
    parser.add_argument("--dataset", help="instead of shakespeare")
    parser.add_argument("--save", action="store_true", help="put the result into experiments/results/lessons.jsonl")
    parser.add_argument("--quick", action="store_true", help="one seed, tiny sizes: only shows that it runs")
    args = parser.parse_args(argv)
    path = RESULTS / "lessons.jsonl"
    try:
        for name, high in (("number", len(lessons())), ("seeds", 16), ("jobs", 64)):
            if not 1 <= getattr(args, name) <= high:
                parser.error(f"{name}={getattr(args, name)}: expected 1 to {high}")
        if args.save and (args.quick or args.dataset or args.seeds < 4):
            parser.error("--save: what is kept has the usual data and four seeds or more, drop the other flags")
        extra = (QUICK if args.quick else {}) | (dict(dataset=args.dataset) if args.dataset else {})
        line = measure(args.number, 1 if args.quick else args.seeds, args.jobs, extra)
        print(f"-{line['change'][0]}\n+{line['change'][1]}\n")
        print(table(line["number"], line["title"], line["measured"]), flush=True)
        if args.save:
            kept = [of for of in read_lines(path) if of["number"] != args.number]
            with replacing(path) as file:
                for of in sorted([*kept, line], key=lambda of: of["number"]):
                    file.write(json.dumps(of).encode() + b"\n")
        return 0
    except (UserError, OSError, BrokenProcessPool) as error:
        print(f"lesson.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1:]))
