"""
The figures, as SVG: readable on light and on dark paper, with colours that the colour-blind can tell apart.

report.py calls these with the committed lines, diagnostics.py with what it has measured itself.
"""

import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from ablations import half_width  # noqa: E402
from diagnostics import INTERVENTIONS, PLACES  # noqa: E402

# Okabe and Ito's palette. None of them is text; lines differ in their marks too
COLOURS = {"base": "#999999", "gated": "#0072B2", "resformer": "#56B4E9", "gated-resformer": "#CC79A7",
           "nuresformer": "#009E73", "exoformer": "#E69F00", "exoformer-dynamic": "#D55E00"}
MARKS = {"base": "x", "gated": "o", "resformer": "v", "gated-resformer": "^", "nuresformer": "s", "exoformer": "D",
         "exoformer-dynamic": "P"}
INK = "#010203"                     # every text and axis; what save replaces
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "exoformer", "font.family": "sans-serif", "font.size": 10,
         "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False,
         "figure.constrained_layout.use": True, "savefig.transparent": True, "lines.markersize": 5,
         **{name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color",
                                   "ytick.color")}}
CSS = "<style>svg{color:#1f2328}text{fill:currentColor}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def figure(rows: int, columns: int, width: float, height: float, **kwargs):
    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **kwargs)


def save(fig, path: Path) -> None:
    """Its text and axes take the colour that the page's theme asks for; the same figure gives the same file."""
    fig.savefig(path, metadata=dict(Date=None, Creator=None))
    plt.close(fig)
    svg = path.read_text(encoding="utf-8").replace(INK, "currentColor")
    svg = re.sub(r"(<svg [^>]*>)", rf"\1{CSS}", svg, count=1)
    svg = re.sub(r"(\d\.\d)\d+(?=[ \"),\n])", r"\1", svg)               # a tenth of a pixel is enough
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M), encoding="utf-8", newline="\n")


def by_variant(lines: list[dict], name: str) -> dict[str, list[dict]]:
    """{variant: the lines of its seeds that have a measure of this name}, in the order of COLOURS."""
    groups = defaultdict(list)
    for line in lines:
        if line.get(name):
            groups[line["variant"]].append(line)
    return {variant: groups[variant] for variant in COLOURS if variant in groups}


# --- Of diagnostics --------------------------------------------------------------------------------
def depth(lines: list[dict], path: Path) -> None:
    """Over the layers: similarity of tokens, attention on the first, principal components for 99 %."""
    panels = {"similarity": "similarity of tokens\n(mean cosine)",
              "first_token": "attention on the first token\n(mean weight)",
              "components": "principal components\nfor 99 % of the variance"}
    fig, axes = figure(1, 3, 9, 2.9)
    for axis, (name, label) in zip(axes[0], panels.items()):
        for variant, group in by_variant(lines, name).items():
            curves = [line[name] for line in group]
            x = range(1, 1 + len(curves[0]))
            for curve in curves[1:] and curves:
                axis.plot(x, curve, color=COLOURS[variant], alpha=0.25, lw=1)
            axis.plot(x, [mean(at) for at in zip(*curves)], color=COLOURS[variant], marker=MARKS[variant],
                      label=variant, clip_on=False)
        axis.set(xlabel="layer", title=label, xticks=list(x), ylim=(0, None))
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(fig, path)


def bars(lines: list[dict], measure: str, names: list[str], value, ylabel: str, path: Path) -> None:
    """Groups of bars, one group a variant, one bar a name; a dot for each seed."""
    groups = by_variant(lines, measure)
    fig, ((axis,),) = figure(1, 1, 7.2, 3.2)
    shades = dict(zip(names, ("#0072B2", "#D55E00", "#E69F00", "#56B4E9")))
    hatches = dict(zip(names, ("", "//", "..", "\\\\")))
    for i, group in enumerate(groups.values()):
        for j, name in enumerate(names):
            seen = [value(line[measure][name]) for line in group if name in line[measure]]
            if seen:
                x = i + (j - (len(names) - 1) / 2) * 0.8 / len(names)
                axis.bar(x, mean(seen), 0.72 / len(names), color=shades[name], hatch=hatches[name],
                         edgecolor="white", lw=0, label=name)
                axis.scatter([x] * len(seen), seen, s=7, color=INK, zorder=3, lw=0)
    axis.set(xticks=range(len(groups)), xticklabels=list(groups), ylabel=ylabel)
    once = dict(zip(*reversed(axis.get_legend_handles_labels())))           # {name: its bar in the last group}
    fig.legend([once[name] for name in names if name in once], [name for name in names if name in once],
               loc="outside upper center", ncols=4)
    save(fig, path)


def gamma(lines: list[dict], path: Path) -> None:
    """γ by a letter's place in its word: a column for each layer, a row for each component."""
    group = [line for line in lines if line.get("gamma")]
    letters = list(group[0]["gamma"])
    layers = len(group[0]["gamma"][letters[0]])
    fig, axes = figure(len(letters), layers, 9, 1.5 * len(letters) + 0.7, sharex=True, sharey=True)
    for row, s in enumerate(letters):
        for n in range(layers):
            axis = axes[row][n]
            for term, (name, style, colour) in enumerate((("γ1, of the anchor", "-", "#D55E00"),
                                                          ("γ2, of the layer's own", "--", "#0072B2"))):
                curves = [line["gamma"][s][n][term] for line in group]
                for curve in curves:
                    axis.plot(curve, style, color=colour, alpha=0.25, lw=1)
                middle = [mean(at) if None not in at else None for at in zip(*curves)]
                axis.plot(middle, style, color=colour, lw=2, label=name)
            axis.set(ylim=(0, 1), yticks=(0, 0.5, 1))
            axis.tick_params(left=n == 0, bottom=row == len(letters) - 1)
            if row == 0:
                axis.set_title(f"layer {n + 1 + group[0]['config']['n_layer'] - layers}")
            if n == 0:
                axis.set_ylabel(f"γ of {s}")
            if row == len(letters) - 1:
                axis.set_xticks(range(len(PLACES)), PLACES, rotation=60, ha="right", rotation_mode="anchor")
    fig.supxlabel("place of the character in its word", fontsize=10)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    save(fig, path)


def lambdas(line: dict, path: Path) -> None:
    """|λ1| / (|λ1| + |λ2|) by layer and channel, a map for each component."""
    fig, axes = figure(len(line["lam"]), 1, 9, 0.95 * len(line["lam"]) + 0.9, sharex=True)
    for axis, (s, rows) in zip(axes[:, 0], line["lam"].items()):
        first = 1 + line["config"]["n_layer"] - len(rows)
        image = axis.imshow(rows, aspect="auto", vmin=0.25, vmax=0.75, cmap="cividis", interpolation="nearest",
                            extent=(0, len(rows[0]), first + len(rows) - 0.5, first - 0.5))
        axis.set(ylabel=f"λ of {s}\nlayer", yticks=range(first, first + len(rows)))
        d_h = line["config"]["n_embd"] // line["config"]["n_head"]
        for edge in range(d_h, len(rows[0]), d_h):
            axis.axvline(edge, color="white", lw=0.8)
    axes[-1, 0].set_xlabel("channel; white lines divide the heads")
    fig.colorbar(image, ax=axes[:, 0], extend="both", label="|λ1| / (|λ1| + |λ2|)", pad=0.01)
    save(fig, path)


def diagnostics(lines: list[dict], name: str, path: Path) -> None:
    """The figure of this name, if the lines have what it shows: depth, interventions, carries, gamma or lambda."""
    measure = {"depth": "similarity", "lambda": "lam"}.get(name, name)
    found = [line for line in lines if line.get(measure)]
    if name == "depth":
        depth(found, path)
    elif found and name == "interventions":
        bars(found, name, list(INTERVENTIONS), lambda of: of["loss"], "loss, nats per byte", path)
    elif found and name == "carries":
        bars(found, name, ["only in the anchors", "only in the stream", "in both"], lambda of: of,
             "predictions move by, nats", path)
    elif found and name == "gamma":
        gamma(found, path)
    elif found and name == "lambda":
        lambdas(found[-1], path)


# --- Of grids --------------------------------------------------------------------------------------
def forest(points: dict[str, dict[str, list[float]]], reference: str, path: Path) -> None:
    """Paired differences in loss to `reference`: {row: {name of a series: a difference for each seed}}.

    A small dot for each seed, a mark for the mean with its 95 % interval.
    """
    fig, ((axis,),) = figure(1, 1, 7.2, 0.5 * len(points) + 1.4)
    series = list(dict.fromkeys(name for of in points.values() for name in of))     # two at most
    for name, mark, colour in zip(series, "oD", ("#0072B2", "#D55E00")):
        rows = [i for i, of in enumerate(points.values()) if name in of]
        seen = [of[name] for of in points.values() if name in of]
        at = [i + 0.34 * (series.index(name) - (len(series) - 1) / 2) for i in rows]
        axis.errorbar([mean(of) for of in seen], at, xerr=[half_width(of) for of in seen], fmt=mark, color=colour,
                      capsize=3, label=name)
        for y, of in zip(at, seen):
            axis.scatter(of, [y + 0.1] * len(of), s=9, color=colour, alpha=0.5, lw=0)
    axis.axvline(0, color=INK, lw=0.8)
    axis.set(yticks=range(len(points)), yticklabels=list(points), ylim=(len(points) - 0.5, -0.5),
             xlabel=f"difference in loss to {reference}, nats per byte; left is better")
    if len(series) > 1:
        fig.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=len(series))
    save(fig, path)
