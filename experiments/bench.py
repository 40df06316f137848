"""
Benchmarks of the core. Each prints a Markdown table and says what it measured on.

    python experiments/bench.py generation     tokens per second, with the cache and without
    python experiments/bench.py mixing         what applying γ apart from λ saves over weights λ γ
    python experiments/bench.py rope           what the model's rotation saves over the textbook's
    python experiments/bench.py shakespeare    nanoGPT's small run beside --preset=shakespeare-cpu

--quick makes each so small that it only shows that it runs. Models that are compared take turns,
so that a machine that slows down slows all of them; ratios are medians over the rounds. What a step
and a token cost with anchors and without: cost.py.
"""

import argparse
import csv
import io
import math
import platform
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import exoformer  # noqa: E402
import train  # noqa: E402
from data import prepare  # noqa: E402
from exoformer import Config, ExoFormer  # noqa: E402

ROWS = ("gated", "exoformer", "exoformer-dynamic")
SIZE = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2)


# --- Timing ---------------------------------------------------------------------------------------
def caption(size: dict, device: torch.device, dtype: str) -> str:
    """What was measured, and on what machine."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
        threads = torch.get_num_threads()
        name = f"{(names or [platform.processor()])[0]}, {threads} thread{'s' * (threads > 1)}"
    sizes = "".join(f"{key} {value}, " for key, value in size.items())
    return f"{sizes}{name}, {dtype}, torch {torch.__version__}\n"


def clock(jobs: dict, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each job in each round. A round runs every job once; one more warms up."""
    seconds = {name: [] for name in jobs}
    for _ in range(1 + rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def ratio(times: list[float], reference: list[float]) -> str:
    """The median of the ratios within a round, and the quarter of them on either side of it."""
    ratios = sorted(a / b for a, b in zip(times, reference))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def models(device: torch.device, size: dict, names=ROWS) -> dict[str, ExoFormer]:
    """A model of each name. Matrices that start at zero are made random: zeros are no work."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in size.items() if name != "batch_size"}
    rows = {name: ExoFormer(Config.variant(name, **sizes)) for name in names}
    for model in rows.values():
        for p in model.parameters():
            if not p.any():
                nn.init.normal_(p, std=0.02)
        model.to(device)
    return rows


def batch(device: torch.device, size: dict) -> Tensor:
    return torch.randint(256, (2, size["batch_size"], size["block_size"]), device=device)


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@torch.no_grad()
def recompute(model: ExoFormer, idx: Tensor, new: int) -> Tensor:
    """Greedy generation without a cache: the whole context again for each token."""
    for _ in range(new):
        idx = torch.cat((idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


def generation(args) -> None:
    """Batch 1 in float32: eight tokens are continued until the context is full."""
    size = TINY if args.quick else SIZE
    new = size["block_size"] - 8
    idx = torch.randint(256, (1, 8), device=args.device)
    jobs = {}
    for name, model in models(args.device, size).items():
        jobs[name] = partial(model.generate, idx, new, temperature=0)
        jobs[name, "slow"] = partial(recompute, model, idx, new)
    seconds = clock(jobs, args.rounds or 5, args.device)
    print(caption(size | dict(batch_size=1), args.device, "float32"))
    print("| variant | tokens/s, cached | recomputing | cached is faster by |\n|---|---|---|---|")
    for name in ROWS:
        slow = seconds[name, "slow"]
        print(f"| `{name}` | {new / median(seconds[name]):.0f} | {new / median(slow):.1f} "
              f"| {ratio(slow, seconds[name])} |")


def plain_terms(mixing, X: Tensor, own: dict, anchors: dict) -> dict[str, tuple[Tensor, Tensor]]:
    """Mixing.terms as one writes it first: each weight λ γ is a tensor as large as the component."""
    weights = {s: tuple(lam.to(own[s].dtype)) for s, lam in mixing.lam.items()}
    if mixing.dynamic:
        for s, gamma in mixing.gamma(X).items():
            weights[s] = tuple(lam * g for lam, g in zip(weights[s], gamma))
    return {s: (w1 * anchors[s], w2 * own[s]) for s, (w1, w2) in weights.items()}


def mixing(args) -> None:
    """Forward and backward with the model's form of the mix and the plain one: of the model, and of one layer's mix.

    One layer's mix is timed in bfloat16 too: it is no matter of matrix products.
    """
    size = TINY if args.quick else SIZE
    x, y = batch(args.device, size)
    forms = {"the model's": exoformer.Mixing.terms, "plain": plain_terms}
    rows = models(args.device, size)

    def whole(model, form):
        with patch.object(exoformer.Mixing, "terms", form), autocast(args.device, args.dtype):
            loss = model(x, y)[1]
        loss.backward()
        model.zero_grad()

    jobs = {("gated", "plain"): partial(whole, rows["gated"], plain_terms)}
    jobs |= {(name, form): partial(whole, rows[name], forms[form]) for name in ROWS[1:] for form in forms}
    seconds = clock(jobs, args.rounds or 15, args.device)
    print(caption(size, args.device, args.dtype))
    print("| forward and backward | the model's mix, of gated's time | plain, of gated's time "
          "| the model's, of plain |\n|---|---|---|---|")

    def row(what: str, new: list[float], plain: list[float], gated: list[float] | None) -> None:
        of_gated = [ratio(times, gated) if gated else "" for times in (new, plain)]
        print(f"| {what} | {of_gated[0]} | {of_gated[1]} | {ratio(new, plain)} |")

    for name in ROWS[1:]:
        row(f"`{name}`, {args.dtype}", seconds[name, "the model's"], seconds[name, "plain"],
            seconds["gated", "plain"])
    shape = (size["batch_size"], size["block_size"], size["n_head"], size["n_embd"] // size["n_head"])
    for name in ROWS[1:]:
        mix = rows[name].blocks[0].attn.mixing
        for dtype in (torch.float32, torch.bfloat16):
            S, A = ({s: torch.randn(shape, dtype=dtype, device=args.device, requires_grad=True)
                     for s in "qkvg"} for _ in range(2))
            gamma = {s: tuple(torch.rand(*shape[:2], 1, 1, dtype=dtype, device=args.device,
                                         requires_grad=True) for _ in range(2)) for s in "qkvg"}

            upstream = [torch.randn(shape, dtype=dtype, device=args.device) for _ in "qkvg"]

            def alone(form):
                with patch.object(exoformer.Mixing, "terms", form), \
                        patch.object(exoformer.Mixing, "gamma", lambda *_: gamma):
                    torch.autograd.backward(list(mix(None, S, A).values()), upstream)

            times = clock({form: partial(alone, terms) for form, terms in forms.items()},
                          args.rounds or 15, args.device)
            row(f"one mix of `{name}`, {str(dtype)[6:]}", times["the model's"], times["plain"], None)


def halves(s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The textbook's rotation: (a cos − b sin, b cos + a sin)."""
    a, b = s.chunk(2, dim=-1)
    cos = cos.chunk(2, dim=-1)[1]
    sin = sin.chunk(2, dim=-1)[1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(s)


def rope(args) -> None:
    """Forward and backward with the model's rotation and the textbook's: of the model, and alone.

    The rotation alone is timed in bfloat16 too, which needs no bfloat16 matrix products.
    """
    size = TINY if args.quick else SIZE
    rounds = args.rounds or 15
    model = models(args.device, size)["exoformer-dynamic"]
    x, y = batch(args.device, size)
    cos, sin = model.cos_sin
    shape = (*x.shape, size["n_head"], model.config.d_h)

    def whole(form):
        with patch.object(exoformer, "rope", form), autocast(args.device, args.dtype):
            loss = model(x, y)[1]
        loss.backward()
        model.zero_grad()

    def alone(form, s):
        s.grad = None
        form(s, cos, sin).sum().backward()

    forms = {"roll": exoformer.rope, "halves": halves}
    tables = {f"model, {args.dtype}": {name: partial(whole, f) for name, f in forms.items()}}
    for dtype in (torch.float32, torch.bfloat16):
        s = torch.randn(shape, dtype=dtype, device=args.device, requires_grad=True)
        tables[f"rotation of q alone, {str(dtype)[6:]}"] = {
            name: partial(alone, f, s) for name, f in forms.items()}
    print(caption(size, args.device, args.dtype))
    print("| forward and backward | by roll, as in the model | by halves | of the model's |"
          "\n|---|---|---|---|")
    for name, jobs in tables.items():
        times = clock(jobs, rounds, args.device)
        by_roll, by_halves = times["roll"], times["halves"]
        print(f"| {name} | {1000 * median(by_roll):.1f} ms | {1000 * median(by_halves):.1f} ms | "
              f"{ratio(by_halves, by_roll)} |")


# --- Training -------------------------------------------------------------------------------------
def trained(*flags: str) -> tuple[dict, str]:
    """The last row of log.csv, and what is printed, of train.py with these flags."""
    with tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()) as text:
        train.train(train.parse([*flags, f"--out_dir={out}", "--max_new_tokens=0"]))
        with open(f"{out}/log.csv", newline="") as file:
            return list(csv.DictReader(file))[-1], text.getvalue()


class NanoGPT(nn.Module):
    """What nanoGPT's README trains on a CPU, of torch's own layers: 4, of 4 heads and d = 128."""

    def __init__(self, characters: Tensor, T: int = 64, d: int = 128):
        super().__init__()
        ids = torch.zeros(256, dtype=torch.int64)
        ids[characters] = torch.arange(len(characters))
        self.register_buffer("ids", ids)                # a byte's id among the characters
        self.embed = nn.Embedding(len(characters), d)
        self.position = nn.Embedding(T, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True, bias=False)
        norm = nn.LayerNorm(d, bias=False)
        self.layers = nn.TransformerEncoder(layer, 4, norm, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(T))
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        H = self.embed(self.ids[idx]) + self.position.weight            # [B, T, d]
        H = self.layers(H, self.mask, is_causal=True)
        logits = H @ self.embed.weight.T                                # tied
        return None, F.cross_entropy(logits.flatten(0, 1), self.ids[targets].flatten())


def adamw_recipe(model: nn.Module, *_) -> list[torch.optim.Optimizer]:
    """nanoGPT's optimizer: matrices decay, gains do not, all at one rate."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return [optimizer]


def cosine(step: int, max_iters: int, warmup_iters: int, *_) -> float:
    """nanoGPT's schedule: linear warm-up, then a cosine down to a tenth."""
    progress = max(0, step - warmup_iters) / (max_iters - warmup_iters)
    return min((step + 1) / (warmup_iters + 1), 0.55 + 0.45 * math.cos(math.pi * progress))


def nanogpt(args, iterations: int, seed: int) -> tuple[float, float]:
    """(seconds of training, loss on the whole validation split) of nanoGPT's model and recipe."""
    _, train_split, val_split = prepare.load(args.dataset, 64)
    options = train.Options(batch_size=12, max_iters=iterations, warmup_iters=iterations // 20,
                            eval_iters=4 if args.quick else 0, seed=seed)
    torch.manual_seed(seed)
    model = NanoGPT(torch.unique(torch.from_numpy(train_split.tokens.astype("int64"))))
    model.to(args.device)
    optimizers = adamw_recipe(model)
    context = autocast(args.device, args.dtype)
    seconds = 0.0
    for step in tqdm(range(iterations), "nanoGPT"):
        start = time.perf_counter()                     # as train.py: with fetching the batch
        x, y = train.fetch(train_split, options, step, args.device)
        train.training_step(model, x, y, step, optimizers, options, context)
        seconds += time.perf_counter() - start
    return seconds, train.evaluate(model, val_split, options, args.device, context)


def shakespeare(args, seed: int = 1337) -> None:
    """What comes from the optimizer, and what from the model. All of the validation split."""
    preset = train.PRESETS["shakespeare-cpu"]
    iterations = 5 if args.quick else 2000
    short = 5 if args.quick else preset["max_iters"]
    flags = [f"--dataset={args.dataset}", f"--seed={seed}", f"--device={args.device}",
             f"--dtype={args.dtype}", "--preset=shakespeare-cpu"]
    flags += ["--eval_iters=4"] if args.quick else []
    adamw = ["--batch_size=12", f"--max_iters={iterations}", f"--warmup_iters={iterations // 20}",
             f"--eval_interval={iterations}", "--muon_lr=1e-3", "--adamw_lr=1e-3"]
    recipe = patch.multiple(train, make_optimizers=adamw_recipe, lr_factor=cosine)

    print(caption({}, args.device, args.dtype))
    print("| run | steps × batch | training | time | loss on the whole validation split |"
          "\n|---|---|---|---|---|")

    def row(name: str, size: str, seconds: float, loss: float) -> None:
        print(f"| {name} | {size} | {seconds:.1f} s | {seconds / reference:.2f} | {loss:.3f} |",
              flush=True)

    with patch.object(train, "lr_factor", cosine):
        reference, loss = nanogpt(args, iterations, seed)
    row("nanoGPT's model and AdamW recipe", f"{iterations} × 12", reference, loss)
    for variant in ("exoformer", "gated", "base"):
        last, _ = trained(*flags, f"--variant={variant}", f"--max_iters={short}")
        row(f"`{variant}`, this preset", f"{short} × {preset['batch_size']}",
            float(last["seconds"]), float(last["val_loss"]))
    with recipe:
        last, _ = trained(*flags, "--variant=base", *adamw)
    row("`base`, nanoGPT's AdamW recipe", f"{iterations} × 12", float(last["seconds"]),
        float(last["val_loss"]))


COMMANDS = {f.__name__: f for f in (mixing, generation, rope, shakespeare)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("bench.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--rounds", type=int, help="rounds of timing")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda ...")
    parser.add_argument("--dtype", default="auto",
                        help="auto, float32 or bfloat16 (default: what train.py takes)")
    parser.add_argument("--dataset", default="shakespeare", help="of shakespeare")
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: expected 1 or more")
    if args.quick:
        args.rounds = args.rounds or 1
    try:
        args.device = train.pick_device(args.device)
        args.dtype = train.pick_dtype(args.dtype, args.device)
        COMMANDS[args.what](args)
        return 0
    except (train.UserError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1:]))
