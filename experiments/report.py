"""
Turn the committed lines of experiments/results/ into the tables of both READMEs and the figures.

    python experiments/report.py            write them
    python experiments/report.py --check    change nothing; fail where a table or a figure is not of these lines

Tables stand between `<!-- table: NAME -->` and `<!-- end -->`. A figure holds a hash of the numbers that it shows.
"""

import argparse
import hashlib
import json
import math
import re
import sys
import textwrap
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cost  # noqa: E402
import lesson  # noqa: E402
from ablations import (GRIDS, MAX_SEEDS, RATES, RESULTS, RUNS, UserError, flags_of, half_width,  # noqa: E402
                       interval, key, lower_in, paired, read, read_lines, spread)

FIGURES = ROOT / "experiments" / "figures"
TEXTS = (ROOT / "README.md", ROOT / "experiments" / "README.md")

NOT_RUN = "*Not run yet.*"
STATIC, DYNAMIC = "exoformer", "exoformer-dynamic"
EMPTY, EQUAL_FLOPS, EQUAL_TIME = ", empty anchors", ", gated's FLOPs", ", gated's time"      # ends of a row's name


# What the paper reports: what is changed, from one row to another, and their perplexities
PAPER = [
    ("a gate, on `base`", "base", "gated", 14.79, 14.64),
    ("layer 1's values in every layer, on `gated`", "gated", "gated-resformer", 14.64, 14.25),
    ("all four components, normalised, elementwise", "gated-resformer", "nuresformer", 14.25, 14.15),
    ("matrices of their own for the anchors", "nuresformer", STATIC, 14.15, 14.13),
    ("γ", STATIC, DYNAMIC, 14.13, 14.09),
    ("no norms on the anchors of `exoformer`", STATIC, STATIC + ", anchor_norm none", 14.13, 14.30),
    ("v normalised after mixing too", STATIC, STATIC + ", post_norm qkv", 14.13, 14.08),
    ("v and g normalised after mixing too", STATIC, STATIC + ", post_norm qkvg", 14.13, 14.07),
    ("anchors of `exoformer` from H_1", STATIC, STATIC + ", anchor_layer 1", 14.13, 14.07),
    ("anchors of `exoformer-dynamic` from H_1", DYNAMIC, DYNAMIC + ", anchor_layer 1", 14.09, 14.02),
    ("anchors of `exoformer-dynamic` from H_2", DYNAMIC, DYNAMIC + ", anchor_layer 2", 14.09, 14.09),
]


# --- Grids -----------------------------------------------------------------------------------------
def of_grid(grid: str, runs: dict[str, dict]) -> dict[str, dict[int, dict]]:
    """{row: {seed: its run}} of the rows with two seeds or more, whichever grid asked for the runs."""
    data = {}
    for run in runs.values():
        if data.setdefault(run["options"]["dataset"], run["data"]) != run["data"]:
            raise UserError(f"the runs are of two data sets named {run['options']['dataset']}: keep those of one")
    found = {row: {} for row in GRIDS[grid]}
    for row in GRIDS[grid]:
        for seed in range(1, 1 + MAX_SEEDS):
            flags = flags_of(grid, row, seed, quick=False)
            run = runs.get(key(flags, data.get(flags.get("dataset", "pystdlib"), dict(train="", val=""))))
            if run:
                found[row][seed] = run
    return {row: by_seed for row, by_seed in found.items() if len(by_seed) > 1}


def finals(by_seed: dict[int, dict]) -> dict[int, float]:
    return {seed: run["final"] for seed, run in by_seed.items()}


def common(found: dict[str, dict[int, dict]]) -> list[int]:
    """The seeds that all rows have."""
    return sorted(set.intersection(*map(set, found.values())))


def grid_table(grid: str, runs: dict[str, dict]) -> str:
    """Every row's mean, and its paired differences to `gated` and, in grids of one axis, to the system itself."""
    found, systems = of_grid(grid, runs), {row: finals(of) for row, of in of_grid("systems", runs).items()}
    axis = grid not in ("systems", "matched", "large")
    gated = systems.get("gated", {}) if axis else finals(found.get("gated", {}))
    to_own = {row: paired(finals(by_seed), systems.get(row.split(", ")[0], {})) for row, by_seed in found.items()}
    if not found or axis and not any(any(differences) for differences in to_own.values()):
        return NOT_RUN                          # or the defaults alone, which are of another grid
    if axis:                                    # the seeds that all rows have, so that their means compare
        found = {row: {seed: by_seed[seed] for seed in common(found)} for row, by_seed in found.items()}
        to_own = {row: paired(finals(by_seed), systems.get(row.split(", ")[0], {})) for row, by_seed in found.items()}
    lines = ["| | parameters | seeds | mean loss | between seeds | difference to `gated`, 95 % interval "
             "| lower in | between differences |" + (" difference to the system itself |" if axis else ""),
             "|---|---|---|---|---|---|---|---|" + ("---|" if axis else "")]
    for row, by_seed in found.items():
        losses, differences = finals(by_seed), paired(finals(by_seed), gated)
        variant, *rest = row.split(", ")
        name = ", ".join([f"`{variant}`", *rest]).replace("_", " ")
        line = (f"| {name} | {next(iter(by_seed.values()))['parameters']:,} | {len(by_seed)} "
                f"| {mean(losses.values()):.4f} | {spread(list(losses.values()))} |")
        if losses == gated or not differences:
            line += "  |  |  |"
        else:
            line += f" {interval(differences)} | {lower_in(differences)} | {spread(differences)} |"
        if axis:
            line += f" {interval(to_own[row]) if any(to_own[row]) else ''} |"
        lines.append(line)
    return "\n".join(lines)


def tokens_to_reach(run: dict, loss: float) -> float:
    """Tokens after which the run's loss is this low, between evaluations by a straight line."""
    per_step = run["tokens"] / run["options"]["max_iters"]
    points = [(int(step) * per_step, value) for step, value in run["losses"].items()]
    for (t0, high), (t1, low) in zip(points, points[1:]):
        if low <= loss < high:
            return t0 + (t1 - t0) * (high - loss) / (high - low)
    return points[-1][0]


def saving(run: dict, gated: dict) -> float:
    """`gated`'s tokens until it has the higher one of the two final losses, divided by the run's."""
    target = max(run["final"], gated["final"])
    return tokens_to_reach(gated, target) / tokens_to_reach(run, target)


def tokens_table(runs: dict[str, dict]) -> str:
    lines = ["| | grid | `gated`'s tokens, of the system's |", "|---|---|---|"]
    for grid in ("systems", "matched", "large"):
        found = of_grid(grid, runs)
        for row in (STATIC, DYNAMIC):
            pairs = [saving(found[row][seed], found["gated"][seed])
                     for seed in sorted(found.get(row, {}).keys() & found.get("gated", {}).keys())]
            if pairs:
                lines.append(f"| `{row}` | {grid} | {mean(pairs):.3f} ± {half_width(pairs):.3f} |")
    return "\n".join(lines)


def budget_table(runs: dict[str, dict]) -> str:
    """At equal tokens, equal FLOPs and equal time: the budget grid has the shorter runs. All are of the same seeds."""
    systems, budget = of_grid("systems", runs), of_grid("budget", runs)
    seeds = common(systems | budget) if systems else []
    gated = finals(systems.get("gated", {}))
    lines = ["| difference to `gated` | at equal tokens | at equal FLOPs | at equal time |", "|---|---|---|---|"]
    for row in (STATIC, DYNAMIC):
        cells = []
        for by_seed in (systems.get(row), budget.get(row + EQUAL_FLOPS), budget.get(row + EQUAL_TIME)):
            differences = paired({seed: loss for seed, loss in finals(by_seed or {}).items() if seed in seeds}, gated)
            if differences:
                steps = next(iter(by_seed.values()))["options"]["max_iters"]
                cells.append(f"{interval(differences)} ({steps} steps, {len(differences)} seeds)")
            else:
                cells.append(NOT_RUN)
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def at_best_rates(runs: dict[str, dict]) -> tuple[dict, dict]:
    """({(system, rates): {seed: loss}}, {system: its losses at the pair of rates where their mean is lowest})."""
    found = of_grid("rates", runs)
    if len(found) < len(GRIDS["rates"]):
        return {}, {}
    losses = {tuple(row.split(", ")): {seed: by_seed[seed]["final"] for seed in common(found)}
              for row, by_seed in found.items()}
    return losses, {variant: min((of for (name, _), of in losses.items() if name == variant),
                                 key=lambda of: mean(of.values())) for variant, _ in losses}


def rates_table(runs: dict[str, dict]) -> str:
    """Each system's mean loss at each pair of rates, over the seeds that all of them have; the best is bold."""
    losses, best = at_best_rates(runs)
    if not losses:
        return NOT_RUN
    variants, rates = (list(dict.fromkeys(names)) for names in zip(*losses))
    lines = [f"| mean loss, {len(best['gated'])} seeds | " + " | ".join(f"`{variant}`" for variant in variants) + " |",
             "|---|" + "---|" * len(variants)]
    for rate in rates:
        flags = flags_of("rates", f"gated, {rate}", 1, quick=False)
        cells = [f"{mean(losses[variant, rate].values()):.4f}" for variant in variants]
        cells = [f"**{cell}**" if losses[variant, rate] is best[variant] else cell
                 for variant, cell in zip(variants, cells)]
        lines.append(f"| Muon {flags['muon_lr']}, AdamW {flags['adamw_lr']} | {' | '.join(cells)} |")
    cells = [interval(paired(best[variant], best["gated"])) if variant != "gated" else "" for variant in variants]
    return "\n".join([*lines, f"| each at its best, difference to `gated` | {' | '.join(cells)} |"])


def paper_table(runs: dict[str, dict]) -> str:
    """What the paper's changes do to the loss, there and here. The verdicts are computed too."""
    rows = ["| change | the paper | here, 95 % interval | seeds | |", "|---|---|---|---|---|"]
    found = {row: finals(of) for grid in ("systems", "anchor-norm", "post-norm", "source")
             for row, of in of_grid(grid, runs).items()}
    for change, before, after, *perplexities in PAPER:
        there, here = math.log(perplexities[1] / perplexities[0]), paired(found.get(after, {}), found.get(before, {}))
        if here:
            verdict = ("not told apart from 0" if abs(mean(here)) < half_width(here) else
                       "as there" if mean(here) * there > 0 else "not as there")
            rows.append(f"| {change} | {there:+.4f} | {interval(here)} | {len(here)} | {verdict} |")
    return "\n".join(rows)


def lines_of(name: str) -> list[dict]:
    return read_lines(RESULTS / f"{name}.jsonl")


def lessons_table() -> str:
    """All lessons, a row for each system and measure."""
    rows = ["| lesson | before | after | difference, 95 % interval | lower in |", "|---|---|---|---|---|"]
    for line in lines_of("lessons"):
        for row in lesson.table(line["number"], line["title"], line["measured"]).splitlines()[2:]:
            rows.append(f"| {line['number']}. {line['title']}: {row[2:]}")
    return "\n".join(rows)


def depth_table(lines: list[dict]) -> str:
    """Mean over the seeds, in the first and in the last layer."""
    if not lines:
        return NOT_RUN
    rows = ["| first layer → last layer | seeds | similarity of tokens | attention on the first token "
            "| principal components for 99 % of the variance | the same, λ1 = 0 | the same, λ2 = 0 | mean gate |",
            "|---|---|---|---|---|---|---|---|"]

    def ends(curves: list[list[float]], form: str) -> str:
        return " → ".join(format(mean(curve[at] for curve in curves), form) for at in (0, -1))
    for variant in dict.fromkeys(line["variant"] for line in lines):
        group = [line for line in lines if line["variant"] == variant]
        cut = [ends([line["interventions"][name]["components"] for line in group], ".0f")
               if name in group[0]["interventions"] else "" for name in ("without anchors", "anchors alone")]
        gate = ends([[of["mean"] for of in line["gate"]] for line in group], ".2f") if group[0]["gate"] else ""
        rows.append(f"| `{variant}` | {len(group)} | {ends([line['similarity'] for line in group], '.2f')} | "
                    f"{ends([line['first_token'] for line in group], '.3f')} | "
                    f"{ends([line['components'] for line in group], '.0f')} | {cut[0]} | {cut[1]} | {gate} |")
    return "\n".join(rows)


def seen_table(lines: list[dict]) -> str:
    """What the paper reports, or its idea, and what these lines show of it. The verdicts are computed too."""
    exo, nu, gated, dynamic = ([line for line in lines if line["variant"] == variant]
                               for variant in ("exoformer", "nuresformer", "gated", "exoformer-dynamic"))
    if not (exo and gated and dynamic):
        return NOT_RUN

    def loss(group: list[dict], what: str) -> float:
        return mean(line["interventions"][what]["loss"] for line in group)

    def left(group: list[dict], what: str, layers: slice = slice(None)) -> float:
        return mean(mean(line["interventions"][what]["components"][layers]) for line in group)

    def similar(group: list[dict]) -> list[float]:
        return [mean(at) for at in zip(*(line["similarity"] for line in group))]

    def named(group: list[dict]) -> str:
        return f"`{group[0]['variant']}`"

    def row(claim: str, seen: bool, figures: str) -> str:
        return f"| {claim} | {'yes' if seen else 'no'} | {figures} |"

    without, alone, T = "without anchors", "anchors alone", exo[0]["config"]["block_size"]
    reusing = [group for group in (exo, nu) if group]
    missed = [loss(group, without) - loss(group, "intact") for group in reusing]
    weight = max(mean(at) for group in (*reusing, gated) for at in zip(*(line["first_token"] for line in group)))
    uniform = sum(1 / n for n in range(1, T + 1)) / T
    d_h = exo[0]["config"]["n_embd"] // exo[0]["config"]["n_head"]
    jumps = [(channel % d_h == 0, abs(b - a)) for line in dynamic for of in line["lam"]["v"]
             for channel, (a, b) in enumerate(zip(of, of[1:]), 1)]
    border, inside = (mean(jump for at_border, jump in jumps if at_border == where) for where in (True, False))
    rows = ["| the paper reports, or expects | seen here | |", "|---|---|---|",
            row("trained models depend on their anchors (§4.5; bound: 0.1 in loss)", min(missed) > 0.1,
                "without them the loss rises by " + ", by ".join(f"{rise:.2f} in {named(group)}"
                                                                 for rise, group in zip(missed, reusing)))]
    if nu:
        last = slice(-1, None)
        rows += [row("with λ1 = 0 ExoFormer's last layer keeps more principal components than NuResFormer's (321 and "
                     "181; bound: 5 % more)", left(exo, without, last) > 1.05 * left(nu, without, last),
                     f"{left(exo, without, last):.0f} and {left(nu, without, last):.0f}"),
                 row("with λ2 = 0 so does the mean of the layers (822 and 611; bound: 5 % more)",
                     left(exo, alone) > 1.05 * left(nu, alone),
                     f"{left(exo, alone):.0f} and {left(nu, alone):.0f}; intact {left(exo, 'intact'):.0f} and "
                     f"{left(nu, 'intact'):.0f}, of {exo[0]['config']['n_embd']}")]
    rows += [row("attention gathers on the first token (bound: twice its weight in uniform attention)",
                 weight > 2 * uniform,
                 f"its mean weight is at most {weight:.3f} in any layer; if attention were uniform, {uniform:.3f}"),
             row("in models trained without anchors tokens grow alike with depth (bound: more alike in the last layer "
                 "than in the first)",
                 similar(gated)[-1] > similar(gated)[0],
                 "; ".join(f"{named(group)}: {', '.join(f'{x:.2f}' for x in similar(group))}"
                           for group in (gated, *reversed(reusing))))]
    if nu:
        cosines = [cosine for line in nu for cosine in line["conflict"].values()]
        rows += [row("layer 1 is torn between its own use and being the anchor (bound: a cosine below 0)",
                     min(cosines) < 0, "the gradients of its weights for its own use and for its use as "
                                       "anchor, at the end of training, have cosines of "
                                       f"{min(cosines):+.2f} to {max(cosines):+.2f}")]
    rows += [row("λ of v has sharp borders between heads (§4.4; bound: changes 1.5 times as large)",
                 border > 1.5 * inside,
                 f"λ1's share changes by {inside:.3f} from channel to channel, by {border:.3f} from head to head")]
    return "\n".join(rows)


def headline(runs: dict[str, dict]) -> str:
    """What the main README says beside its figure."""
    systems, matched, control, budget = ({row: finals(by_seed) for row, by_seed in of_grid(grid, runs).items()}
                                         for grid in ("systems", "matched", "control", "budget"))
    if len(systems) < 7 or len(matched) < 7 or len(control) < 2 or len(budget) < 4:
        return NOT_RUN

    def said(losses: dict[int, float], other: dict[int, float]) -> str:
        return f"{interval(paired(losses, other))} ({lower_in(paired(losses, other))} seeds lower)"

    gated, dynamic, static = systems["gated"], systems[DYNAMIC], systems[STATIC]
    empty, (_, best) = control[DYNAMIC + EMPTY], at_best_rates(runs)
    needed = mean(paired(empty, dynamic)) > -mean(paired({seed: dynamic[seed] for seed in empty}, gated)) / 2
    paragraphs = (
        "Models of 0.8M parameters on tiny Shakespeare, compared seed by seed at equal tokens: the loss of dynamic "
        f"ExoFormer, in nats per character, differs from that of `gated` by {said(dynamic, gated)}, with equal "
        f"parameters by {said(matched[DYNAMIC], matched['gated'])}; the static one's by {said(static, gated)} and "
        f"{said(matched[STATIC], matched['gated'])}" + (
            f"; with each system at the best of {len(RATES)} pairs of rates, dynamic's by "
            f"{said(best[DYNAMIC], best['gated'])}, static's by {said(best[STATIC], best['gated'])}." if best else "."),
        "A control with the same matrices, whose anchors are made from ones and so know no token, differs from the "
        f"system itself by {said(empty, dynamic)}, dynamic, and {said(control[STATIC + EMPTY], static)}, static: at "
        "this size " + ("the token in the anchors is needed for most of the gain." if needed else
                        "the gain does not need the token in the anchors, and what is left of them, learned constants "
                        "with their λ and γ, does at least as well."),
        "At equal time, in which a system with anchors takes fewer steps, dynamic ExoFormer differs from `gated` by "
        f"{said(budget[DYNAMIC + EQUAL_TIME], gated)}, static by {said(budget[STATIC + EQUAL_TIME], gated)}; these "
        "runs do not tell what remains of any of it at a thousand times the size.")
    return "\n\n".join("\n".join(textwrap.wrap(paragraph, 120)) for paragraph in paragraphs)


def provenance(runs: dict[str, dict]) -> str:
    """By what code, versions and how much computing."""
    sources = sorted({f"source `{run['source']}`, torch {run['versions']['torch']}" for run in runs.values()})
    hours = sum(run["seconds"] for run in runs.values()) / 3600
    return f"{len(runs)} runs, {hours:.1f} hours of training on one core each; by {'; '.join(sources)}."


# --- Texts and figures -------------------------------------------------------------------------------
def tables(runs: dict[str, dict]) -> dict[str, str]:
    made = {grid: grid_table(grid, runs) for grid in GRIDS if grid not in ("rates", "budget")}
    made |= dict(rates=rates_table(runs), tokens=tokens_table(runs), budget=budget_table(runs))
    made |= dict(lessons=lessons_table(), provenance=provenance(runs))
    made |= dict(cost="\n\n".join(cost.table(line) for line in lines_of("cost")))
    for suffix in ("", "-large"):
        made[f"diagnostics{suffix}"] = depth_table(lines_of(f"diagnostics{suffix}"))
        made[f"seen{suffix}"] = seen_table(lines_of(f"diagnostics{suffix}"))
    made |= dict(headline=headline(runs), paper=paper_table(runs))
    return made


def filled(text: str, made: dict[str, str]) -> str:
    """The text with its tables in place. Raises UserError for one that nobody makes, and for a missing end."""
    unknown = set(re.findall(r"<!-- table: ([\w-]+) -->", text)) - made.keys()
    if unknown:
        raise UserError(f"nobody makes the table {', '.join(unknown)}: expected one of {', '.join(made)}")
    marks = re.findall(r"<!-- (table: [\w-]+|end) -->", text)
    if any((mark == "end") != bool(i % 2) for i, mark in enumerate(marks)) or len(marks) % 2:
        raise UserError("a '<!-- table: NAME -->' has no '<!-- end -->' of its own: put it back, nothing was written")
    return re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", text, flags=re.S)


def figures(runs: dict[str, dict]) -> dict[str, tuple]:
    """{file name: (function of plots.py, its arguments)}: arguments are plain data, which is what is hashed."""
    points, axes, systems = {}, {}, of_grid("systems", runs)
    for grid, name in (("systems", "as they are"), ("matched", "with equal parameters")):
        found = of_grid(grid, runs)
        for row in (row for row in found if row != "gated" and "gated" in found):
            points.setdefault(row, {})[name] = paired(finals(found[row]), finals(found["gated"]))
    for grid in ("granularity", "anchor-norm", "post-norm", "source", "components", "control"):
        for row, by_seed in of_grid(grid, runs).items():
            differences = paired(finals(by_seed), finals(systems.get(row.split(", ")[0], {})))
            if len(differences) > 1 and any(differences):
                axes[row.replace("_", " ")] = {"": differences}
    made = {"differences.svg": ("forest", [points, "gated"])} if points else {}
    made |= {"axes.svg": ("forest", [axes, "the system itself"])} if axes else {}
    small, large = lines_of("diagnostics"), lines_of("diagnostics-large")
    for suffix, lines in (("", small), ("-large", large)):
        if lines:
            made |= {f"{name}{suffix}.svg": ("diagnostics", [lines, name])
                     for name in ("depth", "interventions", "carries", "gamma", "lambda")}
    return made


def digest(arguments: list) -> str:
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:16]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("report.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 where something disagrees")
    args = parser.parse_args(argv)
    try:
        return write(args.check)
    except (UserError, ImportError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2


def write(check: bool) -> int:
    if not check:
        import plots                                            # or one line before anything is written
    runs, stale = read(), []
    sources = {run["source"] for run in runs.values()}
    if len(sources) > 1:
        raise UserError(f"the runs in {RUNS} are of {len(sources)} versions of the code: keep those of one")
    if not runs:
        raise UserError(f"no runs in {RUNS}: nothing was written")
    made = tables(runs)
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if filled(text, made) != text:
            stale.append(path)
            if not check:
                path.write_text(filled(text, made), encoding="utf-8", newline="\n")
    for name, (function, arguments) in figures(runs).items():
        path, mark = FIGURES / name, f"<!-- of {digest(arguments)} -->\n"
        if not path.exists() or mark not in path.read_text(encoding="utf-8"):
            stale.append(path)
            if not check:
                getattr(plots, function)(*arguments, path)
                svg = path.read_text(encoding="utf-8").replace("<svg ", f"{mark}<svg ", 1)
                path.write_text(svg, encoding="utf-8", newline="\n")
    done = "not of the committed lines, run experiments/report.py" if check else "written"
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {done}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
