"""
Look inside trained models: §4.4 and §4.5 of the paper, and three experiments of our own.

    python experiments/diagnostics.py out/best.pt                   of one run of train.py, or of more
    python experiments/diagnostics.py out/best.pt out-gated/best.pt --to=compare

Per layer: how alike the tokens' hidden vectors are, attention on the first token, principal components for 99 %,
the gate, the anchors' weight λ. Interventions: the model without its anchors, without v's anchor, with anchors alone.
What γ learned, by a letter's place in its word. Who carries the token: one character changed, only in what the anchors
read or only in the residual stream. Writes diagnostics.jsonl and figures into --to (default: diagnostics/ beside the
first checkpoint), and for each system with anchors a page that shows every character of a text: how much it leans on
its anchor, in each layer and component, and its γ.
"""

import argparse
import html
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data.prepare import Split, UserError, load  # noqa: E402
from exoformer import Components, ExoFormer, normalise, rope  # noqa: E402

PLACES = ("space", "1st", "2nd", "3rd", "4th", "5th and on", "other")   # letters of a word, spaces, all other bytes
NEXT = 8                                                                # predictions that a changed character may move


# --- What a layer computes, by hooks ---------------------------------------------------------------
@torch.no_grad()
def layers_of(model: ExoFormer, idx: Tensor) -> list[dict]:
    """Of each layer: H [B, T, d], Ŝ after post-norm by letter, rotated q and k [B, T, h, d_h].

    Where it mixes also, by letter, the anchor's share of the mix by norm [B, T], as in train.anchor_shares, and of a
    dynamic model γ1 and γ2 [2, B, T].
    """
    found, hooks = [], []

    def inside(attn, inputs, output):
        X, anchors, cos, sin, _ = inputs
        own = output[1]
        mixed: Components = own if attn.mixing is None else attn.mixing(X, own, anchors)
        mixed = normalise(attn.norm, mixed)
        layer = dict(mixed=mixed, q=rope(mixed["q"], cos, sin), k=rope(mixed["k"], cos, sin))
        if attn.mixing is not None:
            terms = attn.mixing.terms(X, own, anchors)
            norms = {s: [term.norm(dim=-1) for term in pair] for s, pair in terms.items()}      # [B, T, h] each
            layer["share"] = {s: (anchor / (anchor + mine)).mean(-1) for s, (anchor, mine) in norms.items()}
            if attn.mixing.dynamic:
                layer["gamma"] = {s: torch.stack([g.flatten(2)[..., 0] for g in pair])
                                  for s, pair in attn.mixing.gamma(X).items()}
        found.append(layer)

    for block in model.blocks:
        hooks.append(block.attn.register_forward_hook(inside))
        hooks.append(block.register_forward_hook(lambda _, inputs, output: found[-1].update(H=output[0])))
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return found


# --- Measures (§8 of the paper's diagnostics), each of one layer -----------------------------------
def token_similarity(H: Tensor) -> float:
    """Mean cosine of the hidden vectors of two positions i < j of one sequence: H [B, T, d]."""
    unit = F.normalize(H.double(), dim=-1)
    cosines = unit @ unit.mT                                        # [B, T, T]
    first, second = torch.triu_indices(H.size(1), H.size(1), 1)
    return cosines[:, first, second].mean().item()


def first_token_attention(q: Tensor, k: Tensor) -> float:
    """Mean weight of causal attention on key 0, over batch, heads and all queries: q, k [B, T, h, d_h]."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)                     # [B, h, T, d_h]
    scores = q @ k.mT / q.size(-1) ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[..., 0].mean().item()


def principal_components(H: Tensor, share: float = 0.99) -> int:
    """How many principal components hold this share of the variance of all B·T hidden vectors."""
    vectors = H.flatten(0, 1).double()
    variances = torch.linalg.svdvals(vectors - vectors.mean(0)) ** 2
    cumulative = variances.cumsum(0) / variances.sum()
    return int((cumulative < share - 1e-12).sum()) + 1


def lambda_map(model: ExoFormer) -> dict[str, list]:
    """|λ1| / (|λ1| + |λ2|) by component, [layers that mix, λ's of a layer]."""
    maps = {}
    for block in model.blocks:
        for s, lam in block.attn.mixing.lam.items() if block.attn.mixing else ():
            size = lam.detach().abs().flatten(1)                    # [2, 1, h or d]
            maps.setdefault(s, []).append([round(x, 3) for x in (size[0] / size.sum(0)).tolist()])
    return maps


# --- Interventions ---------------------------------------------------------------------------------
@contextmanager
@torch.no_grad()
def silenced(model: ExoFormer, term: int, components: str = "qkvg"):
    """λ1 (term 0: the anchor's) or λ2 (term 1: the layer's own) is zero within the block, in every layer that mixes."""
    mixings = [block.attn.mixing for block in model.blocks if block.attn.mixing]
    lams = [lam for mixing in mixings for s, lam in mixing.lam.items() if s in components]
    before = [lam.clone() for lam in lams]
    try:
        for lam in lams:
            lam[term] = 0
        yield
    finally:
        for lam, value in zip(lams, before):
            lam.copy_(value)


INTERVENTIONS = {"intact": None, "without anchors": (0,), "without v's anchor": (0, "v"), "anchors alone": (1,)}


def interventions(model: ExoFormer, val: Split, windows: int) -> dict[str, dict]:
    """{what is done: loss, and principal components for 99 % of the variance by layer}."""
    options = train.Options(eval_iters=windows, batch_size=32)
    idx = torch.from_numpy(next(val.fixed(32, 32))[0])
    result = {}
    for name, cut in INTERVENTIONS.items():
        if cut and model.anchor is None or name == "without v's anchor" and "v" not in model.config.mix:
            continue
        with silenced(model, *cut) if cut else torch.no_grad():
            loss = train.evaluate(model, val, options, torch.device("cpu"), torch.no_grad())
            counts = [principal_components(layer["H"]) for layer in layers_of(model, idx)]
        result[name] = dict(loss=loss, components=counts)
    return result


# --- Who carries the token -------------------------------------------------------------------------
def anchors_of(model: ExoFormer, idx: Tensor) -> Components:
    """The anchors that the layers read when the model reads idx."""
    seen = []
    mixing = model.blocks[-1].attn.mixing
    hook = mixing.register_forward_hook(lambda _, inputs, output: seen.append(inputs[2]))
    model(idx)
    hook.remove()
    return seen[0]


def with_anchors(model: ExoFormer, anchors: Components):
    """Within it, every layer that mixes reads these anchors, whatever the model reads."""
    return patch.object(model.anchor, model.config.anchor, lambda _: anchors)


@torch.no_grad()
def who_carries(model: ExoFormer, idx: Tensor) -> dict[str, float]:
    """How far the next predictions move, in nats, if a letter is another one for the anchors or for the stream alone.

    One letter in each window of idx [B, T]. The distance is KL(before ‖ after), the mean over the prediction at that
    letter and the NEXT − 1 ones behind it.
    """
    generator = np.random.default_rng(0)
    changed, places = idx.clone(), []
    for row, tokens in enumerate(idx.tolist()):
        letters = [t for t in range(len(tokens) // 4, len(tokens) - NEXT) if chr(tokens[t]).isalpha()]
        place = int(generator.choice(letters or [len(tokens) // 2]))
        others = [ord(c) for c in "abcdefghijklmnopqrstuvwxyz" if c != chr(tokens[place]).lower()]
        changed[row, place] = int(generator.choice(others))
        places.append(place)
    before, after = anchors_of(model, idx), anchors_of(model, changed)
    at = torch.tensor(places)[:, None] + torch.arange(NEXT)

    def predictions(tokens: Tensor, anchors: Components) -> Tensor:
        with with_anchors(model, anchors):
            logits = model(tokens)[0]
        return logits[torch.arange(len(idx))[:, None], at].log_softmax(-1)              # [B, NEXT, V]

    intact = predictions(idx, before)
    moved = {"only in the anchors": predictions(idx, after), "only in the stream": predictions(changed, before),
             "in both": predictions(changed, after)}
    return {name: (intact.exp() * (intact - p)).sum(-1).mean().item() for name, p in moved.items()}


# --- The tension in layer 1 ------------------------------------------------------------------------
def gradient_conflict(model: ExoFormer, x: Tensor, y: Tensor) -> dict[str, float]:
    """Cosine of the two gradients that layer 1's W^S gets if it is the anchor too: for its own use, and for all others.

    Below 0 the two uses pull against each other. By component, of the loss on x and y [B, T].
    """
    weights = {s: model.blocks[0].attn.W[s].weight for s in model.config.mix}

    def gradient() -> list[Tensor]:
        return list(torch.autograd.grad(model(x, y)[1], list(weights.values())))

    with torch.enable_grad():
        both = gradient()
        internal = model.anchor.internal
        detached = lambda S_1: internal({s: value.detach() for s, value in S_1.items()})    # noqa: E731
        with patch.object(model.anchor, "internal", detached):
            own = gradient()
    return {s: F.cosine_similarity(g_own.flatten(), (g - g_own).flatten(), dim=0).item()
            for s, g, g_own in zip(weights, both, own)}


# --- What γ learned --------------------------------------------------------------------------------
def places_in_words(tokens: list[int]) -> list[int | None]:
    """Of each byte an index into PLACES; None before the first byte that is no letter, where words may be cut."""
    places, place = [], None
    for token in tokens:
        letter = token < 128 and chr(token).isalpha()
        if letter and place is not None:
            place = min(place + 1, 5)
        elif not letter:
            place = 0
        places.append(place if letter else 0 if chr(token).isspace() else len(PLACES) - 1)
    return places


def gamma_by_place(layers: list[dict], idx: Tensor) -> dict[str, list]:
    """Mean γ1 and γ2 by component: [layer][γ1, γ2][place], NaN-free: None where no byte has that place."""
    place = torch.tensor([[-1 if p is None else p for p in places_in_words(row)] for row in idx.tolist()])
    result = {}
    for layer in layers:
        for s, pair in layer.get("gamma", {}).items():
            means = [[round(gamma[place == p].mean().item(), 4) if (place == p).any() else None
                      for p in range(len(PLACES))] for gamma in pair]
            result.setdefault(s, []).append(means)
    return result


# --- All of one checkpoint -------------------------------------------------------------------------
@torch.no_grad()
def measure(path: Path, dataset: str | None, windows: int) -> tuple[dict, ExoFormer, Split]:
    """(the checkpoint's line, its model, the split that it was measured on)."""
    checkpoint, model = train.load_checkpoint(path)
    options, config = checkpoint["options"], model.config
    if checkpoint["data"].get("tokenizer") != "bytes" or config.vocab_size < 256 or config.block_size < 2 * NEXT:
        raise UserError(f"{path} has the tokenizer {checkpoint['data'].get('tokenizer')} and block_size="
                        f"{config.block_size}: expected bytes, as letters are looked for, and {2 * NEXT} or more")
    _, _, val = load(dataset or options["dataset"], config.block_size, config.vocab_size)
    model.eval()
    idx = torch.from_numpy(next(val.fixed(32, 32))[0])
    layers = layers_of(model, idx)
    gates = [layer["mixed"]["g"].sigmoid() for layer in layers] if config.gate else []
    line = dict(
        variant=options["variant"], seed=options["seed"], steps=checkpoint["step"], dataset=options["dataset"],
        config=asdict(config), data={split: checkpoint["data"][split] for split in ("train", "val")},
        similarity=[round(token_similarity(layer["H"]), 4) for layer in layers],
        first_token=[round(first_token_attention(layer["q"], layer["k"]), 4) for layer in layers],
        components=[principal_components(layer["H"]) for layer in layers],
        gate=[dict(mean=round(g.mean().item(), 4), closed=round((g < 0.1).float().mean().item(), 4),
                   open=round((g > 0.9).float().mean().item(), 4)) for g in gates],
        interventions=interventions(model, val, windows))
    if model.anchor is not None:
        shares = {n: {s: round(share.mean().item(), 4) for s, share in layer.get("share", {}).items()}
                  for n, layer in enumerate(layers, 1)}
        texts = torch.from_numpy(np.concatenate([x for x, _ in val.fixed(256, 64)]))
        line |= dict(lam=lambda_map(model), shares=shares, carries=who_carries(model, texts))
    if config.anchor == "internal":
        x, y = (torch.from_numpy(ids) for ids in next(val.fixed(64, 64)))
        line |= dict(conflict=gradient_conflict(model, x, y))
    if config.dynamic:
        line |= dict(gamma=gamma_by_place(layers, idx))
    return line, model, val


# --- The page --------------------------------------------------------------------------------------
def page(model: ExoFormer, text: bytes, title: str) -> str:
    """An HTML page: `text`, each character coloured by its γ or by how much it leans on its anchor."""
    T, half = model.config.block_size, (model.config.block_size + 1) // 2
    starts = range(0, max(1, len(text) - T + half), half)
    windows = [text[start:start + T].ljust(T, b" ") for start in starts]    # but for the first, the last half counts

    def joined(seen: Tensor) -> list[int]:
        values = torch.cat((seen[0, :T - half], seen[:, T - half:].flatten()))      # seen [windows, T]
        return [round(value * 100) for value in values[:len(text)].tolist()]

    layers = layers_of(model, torch.tensor([list(window) for window in windows]))
    values = {f"{n} {s} share": joined(share)
              for n, layer in enumerate(layers, 1) for s, share in layer.get("share", {}).items()}
    values |= {f"{n} {s} γ{1 + term}": joined(pair[term])
               for n, layer in enumerate(layers, 1) for s, pair in layer.get("gamma", {}).items() for term in (0, 1)}
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    shown = {10: "↵</i>\n<i>"} | {byte: html.escape(chr(byte)) for byte in range(33, 127)}     # all else: a space
    spans = "".join(f"<i>{shown.get(byte, ' ')}</i>" for byte in text).replace("\n<i></i>", "\n")
    return (template.replace("{{title}}", html.escape(title)).replace("{{text}}", spans)
            .replace("{{values}}", json.dumps(values, separators=(",", ":"))))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("diagnostics.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path, help="files of train.py: best.pt or last.pt")
    parser.add_argument("--to", type=Path, help="a folder (default: diagnostics/ beside the first checkpoint)")
    parser.add_argument("--dataset", help="whose validation split is read (default: the checkpoint's)")
    parser.add_argument("--windows", type=int, default=256, help="windows of the interventions' losses; 0 for all")
    parser.add_argument("--text", type=Path, help="the text of the page (default: the start of the validation split)")
    args = parser.parse_args(argv)
    to = args.to or args.checkpoints[0].parent / "diagnostics"
    try:
        if args.windows < 0:
            raise UserError(f"--windows={args.windows}: expected 0 or more")
        if to.exists() and any(to.iterdir()):
            raise UserError(f"{to} is not empty: name another folder with --to, or move its files away")
        lines, pages = [], {}
        for path in args.checkpoints:
            line, model, val = measure(path, args.dataset, args.windows)
            same = [other for other in lines if other["variant"] == line["variant"]]
            if any(other["config"] != line["config"] or other["seed"] == line["seed"] for other in same):
                raise UserError(f"{path}: another {line['variant']}, of other settings or of the same seed, was given: "
                                "expected one a seed, as figures are means over seeds; look at this one alone")
            lines.append(line)
            print(table(line), flush=True)
            if model.anchor is not None:
                text = (args.text.read_bytes() if args.text else bytes(val.tokens[:1200].tolist()))[:5000]
                name = f"{line['variant']}, seed {line['seed']}"
                pages[f"{name}.html"] = page(model, text, f"{name}, {line['steps']} steps on {line['dataset']}")
        to.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (to / name).write_text(text, encoding="utf-8")
        with open(to / "diagnostics.jsonl", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        try:
            import plots
        except ImportError as error:
            print(f"no figures: {error}; pip install -r experiments/requirements.txt", file=sys.stderr)
        else:
            for name in ("depth", "interventions", "carries", "gamma", "lambda"):
                plots.diagnostics(lines, name, to / f"{name}.svg")
        print(f"in {to}: {', '.join(sorted(path.name for path in to.iterdir()))}")
        return 0
    except (UserError, OSError) as error:
        print(f"diagnostics.py: {error}", file=sys.stderr)
        return 2


def table(line: dict) -> str:
    """The line for a reader, as Markdown."""
    rows = [f"**{line['variant']}**, seed {line['seed']}, {line['steps']} steps on {line['dataset']}\n",
            "| layer | similarity of tokens | attention on the first | principal components for 99 % | gate, mean "
            "| gate below 0.1 | the anchors' share |", "|---|---|---|---|---|---|---|"]
    measures = zip(line["similarity"], line["first_token"], line["components"])
    for n, (similar, first, count) in enumerate(measures, 1):
        gate = line["gate"][n - 1] if line["gate"] else None
        shares = line.get("shares", {}).get(n, {})
        rows.append(f"| {n} | {similar:.3f} | {first:.3f} | {count} | "
                    + (f"{gate['mean']:.2f} | {gate['closed']:.0%}" if gate else " | ")
                    + f" | {', '.join(f'{s} {share:.0%}' for s, share in shares.items())} |")
    losses = ", ".join(f"{name} {of['loss']:.4f}" for name, of in line["interventions"].items())
    rows.append(f"\nLoss: {losses}")
    if "carries" in line:
        rows.append("A changed letter moves the next predictions by (nats): "
                    + ", ".join(f"{name} {of:.3f}" for name, of in line["carries"].items()))
    if "conflict" in line:
        rows.append("Cosine of the gradients of layer 1's W for its own use and as the anchor: "
                    + ", ".join(f"{s} {cosine:+.2f}" for s, cosine in line["conflict"].items()))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1:]))
