"""
Train an ExoFormer on one CUDA GPU or on the CPU.

    python train.py                                   the main job: exoformer-dynamic on Python's own standard library
    python train.py --variant=gated --max_iters=300   any flag below, --key=value or --key value
    python train.py --init_from=resume                go on from out_dir's checkpoint
    python train.py --sample="def main("              no training: continue a prompt with out_dir's checkpoint

Reads top to bottom: options -> data -> optimizers -> precision -> evaluation and checkpoint -> training -> sampling.
"""

import argparse
import codecs
import csv
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.prepare import DataError, prepare
from exoformer import Config, ExoFormer

DATA = Path(__file__).resolve().parent / "data"

# ---------------------------------------------------------------------------------------------------------------------
# Options: nanoGPT's names; every field is a flag

DEFAULTS = {    # what suits a device, where no flag says otherwise
    "cpu":  dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, max_iters=900, warmup_iters=40,
                 muon_lr=0.005, adamw_lr=3e-3, eval_interval=300),
    "cuda": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=2500, warmup_iters=100,
                 muon_lr=0.005, adamw_lr=3e-3, eval_interval=500),
}


def flag(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    out_dir: str = flag("out", "where the checkpoint and log.csv go")
    dataset: str = flag("pystdlib", "a folder below data/, made by data/prepare.py")
    init_from: str = flag("scratch", "scratch, or resume: go on from out_dir's checkpoint")
    sample: str = flag(None, "continue this prompt with out_dir's checkpoint instead of training")
    eval_only: bool = flag(False, "evaluate once and leave")
    eval_interval: int = flag(None, "steps between evaluations, each followed by a checkpoint")
    eval_iters: int = flag(256, "validation windows of block_size tokens, spread evenly over the split")
    log_interval: int = flag(10, "steps between rows of log.csv")
    variant: str = flag("exoformer-dynamic", "a system of exoformer.VARIANTS")
    granularity: str = flag(None, "weights λ per component: scalar, headwise or elementwise (default: the variant's)")
    mix: str = flag(None, "components that mix, letters of qkvg (default: the variant's)")
    anchor_norm: str = flag(None, "anchors that are normalised, letters of qkvg, or none (default: the variant's)")
    post_norm: str = flag(None, "components normalised after mixing: qk, qkv or qkvg (default: the variant's)")
    anchor_layer: int = flag(None, "k of the H_k that exogenous anchors read (default: the variant's)")
    n_layer: int = flag(None, "layers")
    n_head: int = flag(None, "heads per layer")
    n_embd: int = flag(None, "width")
    block_size: int = flag(None, "context, in tokens")
    batch_size: int = flag(None, "sequences per micro-batch")
    gradient_accumulation_steps: int = flag(1, "micro-batches per step")
    max_iters: int = flag(None, "optimizer steps")
    warmup_iters: int = flag(None, "steps of linear warm-up; the last fifth of all steps decays to a tenth")
    muon_lr: float = flag(None, "peak rate of Muon, for the hidden matrices")
    adamw_lr: float = flag(None, "peak rate of AdamW, for everything else")
    weight_decay: float = flag(0.1, "of Muon; AdamW has none")
    grad_clip: float = flag(1.0, "largest norm of the whole gradient, 0 for no limit")
    device: str = flag("auto", "auto, cpu, cuda, cuda:1 ...")
    dtype: str = flag("auto", "auto, float32 or bfloat16 (autocast; the weights stay float32)")
    compile: bool = flag(None, "use torch.compile (default: on CUDA only)")
    seed: int = flag(1337, "of initialisation, batches and the sample")


class UserError(Exception):
    """A mistake of the user's: the message is one line with the value, what was expected and the remedy."""


def parse(argv: list[str]) -> Options:
    def boolean(text: str) -> bool:
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(message)

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Options):
        default = f.default if f.default is not None else " / ".join(
            f"{DEFAULTS[device][f.name]} on {device}" for device in DEFAULTS if f.name in DEFAULTS[device])
        kind = dict(type=boolean, nargs="?", const=True, metavar="true|false") if f.type is bool else dict(
            type=f.type, metavar=f.type.__name__)
        parser.add_argument(f"--{f.name}", default=f.default, **kind,
                            help=f.metadata["help"] + (f" (default: {default})" if default != "" else ""))
    values, unknown = parser.parse_known_args(argv)
    for argument in unknown:
        name = argument.lstrip("-").split("=")[0]
        near = get_close_matches(name, [f.name for f in fields(Options)], 1)
        raise UserError(f"{argument!r} is no flag" + (f", did you mean --{near[0]}?" if near else ": see --help"))
    options = Options(**vars(values))
    for f in fields(Options):
        value = getattr(options, f.name)
        smallest = {"eval_iters": 1, "max_iters": 0, "warmup_iters": 0}.get(f.name, 0 if f.type is float else 1)
        if f.type in (int, float) and f.name not in ("seed", "anchor_layer") and value is not None and value < smallest:
            raise UserError(f"--{f.name}={value}: expected {smallest} or more")
    return options


# ---------------------------------------------------------------------------------------------------------------------
# Data

class Split:
    """One .bin file of a data set, its ids checked where they enter: forward never looks at them."""

    def __init__(self, folder: Path, name: str, vocab_size: int, block_size: int):
        self.path, self.vocab_size, self.block_size = folder / f"{name}.bin", vocab_size, block_size
        self.tokens = np.memmap(self.path, dtype="<u2", mode="r")
        if len(self.tokens) < block_size + 1:
            raise UserError(f"{self.path} has {len(self.tokens)} tokens: expected at least block_size + 1 = "
                            f"{block_size + 1}, set a smaller --block_size")

    def windows(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [len(starts), block_size] each."""
        rows = self.tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        if rows.max() >= self.vocab_size:
            raise UserError(f"{self.path} holds the id {rows.max()}: expected ids below vocab_size={self.vocab_size}")
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]

    def batch(self, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step, a pure function of (seed, step): nothing else can change or replay it."""
        return self.windows(np.random.default_rng((seed, step)).integers(len(self.tokens) - self.block_size, size=size))

    def fixed(self, count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same `count` windows at every call, spread evenly, in batches of at most `size`."""
        starts = np.linspace(0, len(self.tokens) - self.block_size - 1, count).astype(np.int64)
        return (self.windows(starts[i:i + size]) for i in range(0, count, size))


def load_data(name: str, block_size: int) -> tuple[dict, Split, Split]:
    """meta.json's content and both splits of data/<name>; makes the default data set where it is missing."""
    folder = DATA / name
    if not (folder / "meta.json").exists():
        if name != "pystdlib":
            raise UserError(f"--dataset={name}: no {folder / 'meta.json'}, make it with 'python data/prepare.py "
                            f"{name if name == 'shakespeare' else name + '.txt'}'")
        prepare(name)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return meta, *(Split(folder, split, meta["vocab_size"], block_size) for split in ("train", "val"))


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers: Muon for the hidden matrices, AdamW for the rest, one schedule for both

def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly U Vᵀ of each matrix's SVD U Σ Vᵀ, g [k, rows, cols]: Newton–Schulz moves every singular value towards 1.

    The quintic a σ + b σ³ + c σ⁵ is steep at 0, so that five rounds suffice, and leaves σ between about 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.size(1) > g.size(2) else g                            # the smaller Gram matrix
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)            # all σ <= 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)   # a x + (b gram + c gram²) x
    return x.mT if g.size(1) > g.size(2) else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised, with decoupled weight decay, for 2-D weights.

    torch.optim.Muon always iterates in bfloat16, which a CPU without native bfloat16 does 40 times slower than float32;
    here `dtype` says, and all matrices of one shape go through the iteration together.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.1,
                 dtype: torch.dtype = torch.float32):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for (rows, cols), params in shapes.items():
                updates = []
                for p in params:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))              # Nesterov: look ahead
                updates = orthogonalise(torch.stack(updates).to(self.dtype))            # [k, rows, cols]
                scale = max(1, rows / cols) ** 0.5                                      # as large for tall matrices
                for p, update in zip(params, updates.to(p.dtype).unbind()):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(for Muon, for AdamW). Raises ValueError unless exactly one of the two takes each parameter."""
    muon = ("*.proj.?.weight", "*.out.weight", "*.gate.weight", "*.up.weight", "*.down.weight", "*.W?.weight")
    adamw = ("embed.weight", "head.weight", "*norm*.weight", "*.lam.*", "*.bias")       # λ whatever its rank
    groups = [], []
    for name, p in model.named_parameters():
        takers = [group for group, rows in zip(groups, (muon, adamw)) if any(fnmatch(name, row) for row in rows)]
        if len(takers) != 1:
            raise ValueError(f"parameter {name!r} belongs to {len(takers)} optimizers: expected one, add it to a row")
        takers[0].append(p)
    return groups


def make_optimizers(model: nn.Module, options: Options, device: torch.device) -> list[torch.optim.Optimizer]:
    matrices, others = split_parameters(model)
    dtype = torch.bfloat16 if native_bfloat16(device) else torch.float32
    return [Muon(matrices, lr=options.muon_lr, weight_decay=options.weight_decay, dtype=dtype),
            torch.optim.AdamW(others, lr=options.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def lr_factor(step: int, max_iters: int, warmup_iters: int) -> float:
    """What multiplies both peak rates in step 0, 1, ...: linear warm-up, 1, then the last fifth linearly to 0.1."""
    warmup = (step + 1) / max(1, warmup_iters)
    decay = 0.1 + 0.9 * (max_iters - 1 - step) / max(1, round(0.2 * max_iters))
    return min(1.0, warmup, decay)


# ---------------------------------------------------------------------------------------------------------------------
# Precision and compilation

def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device={name}: expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device={name}: no usable CUDA GPU here, use --device=cpu")
    return device


def native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are done in hardware: torch.cuda.is_bf16_supported() also says yes to emulation."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()


def make_autocast(dtype: str, device: torch.device) -> torch.autocast:
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype={dtype}: expected auto, float32 or bfloat16")
    on = dtype == "bfloat16" or dtype == "auto" and native_bfloat16(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def compiled(model: nn.Module, x: Tensor, y: Tensor, autocast) -> nn.Module:
    """torch.compile(model), or the model itself with a warning: compilation happens, and fails, at the first call."""
    try:
        net = torch.compile(model)
        with autocast:
            loss = net(x, y)[1]
        loss.backward()
    except Exception as error:
        print(f"warning: torch.compile failed, going on without it: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        net = model
    model.zero_grad(set_to_none=True)
    return net


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and checkpoint

@torch.no_grad()
def evaluate(model: ExoFormer, val: Split, options: Options, device: torch.device, autocast) -> float:
    """Mean loss in nats per token over the fixed validation windows."""
    total = 0.0
    for x, y in val.fixed(options.eval_iters, options.batch_size):
        with autocast:
            total += model(x.to(device), y.to(device))[1].item() * len(x)
    return total / options.eval_iters


def save(path: Path, checkpoint: dict) -> None:
    """Write to a temporary file and rename it: a kill at any moment leaves the old checkpoint or the new one."""
    torch.save(checkpoint, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load(out_dir: str, device: torch.device) -> tuple[dict, ExoFormer]:
    """out_dir's checkpoint and its model."""
    path = Path(out_dir) / "checkpoint.pt"
    if not path.exists():
        raise UserError(f"--out_dir={out_dir}: no {path}, train first")
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    model = ExoFormer(Config(**checkpoint["config"])).to(device)
    model.load_state_dict(checkpoint["model"])
    return checkpoint, model


# ---------------------------------------------------------------------------------------------------------------------
# Training

def train(options: Options) -> float:
    """Train as the options say; returns the final validation loss."""
    device = pick_device(options.device)
    for name, value in DEFAULTS.get(device.type, DEFAULTS["cpu"]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    autocast, accumulation = make_autocast(options.dtype, device), options.gradient_accumulation_steps
    meta, train_split, val_split = load_data(options.dataset, options.block_size)
    if options.init_from == "scratch":
        torch.manual_seed(options.seed)
        axes = ("n_layer", "n_head", "n_embd", "block_size", "granularity", "mix", "anchor_norm", "post_norm", "anchor_layer")
        overrides = {name: getattr(options, name) for name in axes if getattr(options, name) is not None}
        try:
            config = Config.variant(options.variant, vocab_size=meta["vocab_size"], **overrides)
        except ValueError as error:
            raise UserError(str(error)) from None
        checkpoint, model = {"step": 0}, ExoFormer(config).to(device)
    elif options.init_from == "resume":
        checkpoint, model = load(options.out_dir, device)
    else:
        raise UserError(f"--init_from={options.init_from}: expected scratch or resume")
    optimizers = make_optimizers(model, options, device)
    for optimizer, state in zip(optimizers, checkpoint.get("optimizers", ())):
        optimizer.load_state_dict(state)

    total, hidden = model.num_params()
    print(f"{options.variant}: {total:,} parameters, {hidden:,} without embedding and head; {meta['name']}: "
          f"{len(train_split.tokens):,} tokens; {device.type}, {'bfloat16' if autocast._enabled else 'float32'}")
    if options.eval_only:
        val_loss = evaluate(model, val_split, options, device, autocast)
        print(f"validation loss {val_loss:.4f} nats/token, perplexity {math.exp(val_loss):.3f}")
        return val_loss

    out = Path(options.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    log_file = open(out / "log.csv", "a" if checkpoint["step"] else "w", newline="", encoding="utf-8")
    log = csv.writer(log_file)
    if checkpoint["step"] == 0:
        log.writerow(("step", "train_loss", "val_loss", "lr_factor", "grad_norm", "tokens_per_second"))
    net = model
    if options.compile if options.compile is not None else device.type == "cuda":
        x, y = train_split.batch(options.batch_size, options.seed, 0)
        net = compiled(model, x.to(device), y.to(device), autocast)

    tokens_per_step, seconds, val_loss = options.batch_size * accumulation * options.block_size, 0.0, math.nan
    bar = tqdm(range(checkpoint["step"], options.max_iters), initial=checkpoint["step"], total=options.max_iters, desc="train")
    for step in bar:
        start = time.perf_counter()
        factor = lr_factor(step, options.max_iters, options.warmup_iters)
        for optimizer, peak in zip(optimizers, (options.muon_lr, options.adamw_lr)):
            optimizer.param_groups[0]["lr"] = peak * factor
        x, y = train_split.batch(options.batch_size * accumulation, options.seed, step)
        loss = torch.zeros((), device=device)                                   # mean over the micro-batches
        for x_micro, y_micro in zip(x.to(device).chunk(accumulation), y.to(device).chunk(accumulation)):
            with autocast:
                micro_loss = net(x_micro, y_micro)[1] / accumulation
            micro_loss.backward()
            loss += micro_loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip or math.inf)
        loss = loss.item()
        if not math.isfinite(loss):
            raise UserError(f"loss {loss} in step {step} with muon_lr={options.muon_lr * factor:.3g}, "
                            f"adamw_lr={options.adamw_lr * factor:.3g}: expected a number, lower the rates")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - start

        done, evaluated = step + 1, False
        if done % options.eval_interval == 0 or done == options.max_iters:
            val_loss, evaluated = evaluate(model, val_split, options, device, autocast), True
            tqdm.write(f"step {done}: validation loss {val_loss:.4f} nats/token")
            save(out / "checkpoint.pt", dict(
                step=done, val_loss=val_loss, config=asdict(model.config), options=asdict(options), dataset=meta,
                model=model.state_dict(), optimizers=[optimizer.state_dict() for optimizer in optimizers]))
        if done % options.log_interval == 0 or evaluated:
            speed = tokens_per_step * (done - checkpoint["step"]) / seconds
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{speed:,.0f}")
            log.writerow((done, f"{loss:.5f}", f"{val_loss:.5f}" if evaluated else "", f"{factor:.4f}",
                          f"{norm.item():.4f}", f"{speed:.0f}"))
            log_file.flush()
    log_file.close()
    return val_loss


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

def sample(options: Options, prompt: str, new_tokens: int = 400) -> None:
    """Stream a continuation of the prompt by out_dir's checkpoint."""
    checkpoint, model = load(options.out_dir, device := pick_device(options.device))
    if checkpoint["dataset"]["tokenizer"] != "bytes":
        raise UserError(f"--sample on a tokenizer {checkpoint['dataset']['tokenizer']!r}: expected bytes")
    idx = torch.tensor([list(prompt.encode() or b"\n")], device=device)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode        # a character may span tokens
    print(prompt, end="")
    generator = torch.Generator(device).manual_seed(options.seed)
    for token in model.stream(idx, new_tokens, temperature=0.8, generator=generator):
        print(decode(bytes([token.item()])), end="", flush=True)
    print()


def main(argv: list[str]) -> int:
    try:
        options = parse(argv)
        if options.sample is not None:
            sample(options, options.sample)
            return 0
        val_loss = train(options)
        if not options.eval_only:
            print("\na sample:")
            sample(options, "\n")
            print(f"\nvalidation loss {val_loss:.4f} nats/token, perplexity {math.exp(val_loss):.3f}")
        return 0
    except (UserError, DataError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
