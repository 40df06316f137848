"""
Train an ExoFormer on one CUDA GPU or on the CPU.

    python train.py                                   the main job: exoformer-dynamic on Python's own standard library
    python train.py --variant=gated --max_iters=300   any flag below, --key=value or --key value
    python train.py --init_from=resume                go on from out_dir's checkpoint, with its options
    python train.py --sample="def main("              no training: continue a prompt with out_dir's checkpoint

Reads top to bottom: options -> optimizers -> precision -> evaluation and checkpoint -> training -> sampling.
"""

import argparse
import codecs
import csv
import math
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.prepare import Split, UserError, load as load_data
from exoformer import Config, ExoFormer

# ---------------------------------------------------------------------------------------------------------------------
# Options: nanoGPT's names, every field a flag

DEFAULTS = {    # what suits a device
    "cpu":  dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, max_iters=750, warmup_iters=40,
                 muon_lr=0.006, adamw_lr=0.003, eval_interval=250),
    "cuda": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=2500, warmup_iters=100,
                 muon_lr=0.006, adamw_lr=0.003, eval_interval=500),
}


def flag(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    out_dir: str = flag("out", "where the checkpoint and log.csv go")
    dataset: str = flag("pystdlib", "a folder below data/, made by data/prepare.py")
    init_from: str = flag("scratch", "scratch, or resume: go on from out_dir's checkpoint")
    sample: str = flag(None, "continue this prompt with out_dir's checkpoint instead of training")
    max_new_tokens: int = flag(400, "of a sample")
    temperature: float = flag(0.8, "of a sample; 0 always takes the likeliest token")
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


class Parser(argparse.ArgumentParser):
    def error(self, message: str):              # one line for main to print, instead of the whole usage
        raise UserError(message)


def boolean(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))         # ValueError for anything else


def parse(argv: list[str]) -> dict:
    """The flags that are given. Raises UserError for an unknown one, a wrong type and a size out of range."""
    parser = Parser("train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        defaults = {str(row[f.name]): device for device, row in DEFAULTS.items() if f.name in row}
        default = defaults and " / ".join(f"{v} on {device}" for v, device in defaults.items()) or f.default
        parser.add_argument(
            f"--{f.name}", type=boolean if f.type is bool else f.type, metavar=f.type.__name__,
            help=f.metadata["help"] + ("" if default is None else f" (default: {default})"),
            **dict(nargs="?", const=True) if f.type is bool else {})            # --eval_only alone means True
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        near = get_close_matches(unknown[0].lstrip("-").split("=")[0], [f.name for f in fields(Options)], 1)
        raise UserError(f"{unknown[0]!r} is no flag" + (f", did you mean --{near[0]}?" if near else ": see --help"))
    at_least_0 = ("warmup_iters", "weight_decay", "grad_clip", "muon_lr", "adamw_lr", "temperature", "anchor_layer",
                  "max_new_tokens", "seed")
    for name, value in vars(values).items():
        smallest, limit = 0 if name in at_least_0 else 1, math.inf if type(value) is float else 2**63
        if type(value) in (int, float) and not smallest <= value < limit:       # a nan is neither
            raise UserError(f"--{name}={value}: expected {smallest} or more, and finite")
    return vars(values)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers: Muon for the hidden matrices, AdamW for the rest, one schedule for both

def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly U Vᵀ of each matrix's SVD U Σ Vᵀ, g [k, rows, cols]: Newton–Schulz moves every singular value towards 1.

    Each round maps σ to a σ + b σ³ + c σ⁵. That is steep at 0, so that five rounds bring all but the smallest near 1.
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

    torch.optim.Muon always iterates in bfloat16, far slower than float32 on a CPU that has to emulate it; here `dtype`
    says which, and all matrices of one shape go through the iteration together.
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
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    buffer = self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
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
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device={name}: expected auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device={name}: {torch.cuda.device_count()} usable CUDA GPUs here, try --device=cpu")
    return device


def native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are done in hardware: torch.cuda.is_bf16_supported() also says yes to emulation."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()


def pick_dtype(name: str, device: torch.device) -> str:
    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype={name}: expected auto, float32 or bfloat16")
    return name if name != "auto" else "bfloat16" if native_bfloat16(device) else "float32"


def compiled(model: nn.Module, x: Tensor, y: Tensor, autocast) -> nn.Module:
    """torch.compile(model), or the model itself with a warning: compilation happens, and fails, at the first call."""
    try:
        net = torch.compile(model)
        with autocast:
            loss = net(x, y)[1]
        loss.backward()
    except Exception as error:
        print(f"warning: torch.compile failed, going on without it: {first_line(error)}", file=sys.stderr)
        net = model
    model.zero_grad(set_to_none=True)
    return net


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and checkpoint

@torch.no_grad()
def evaluate(model: ExoFormer, val: Split, options: Options, device: torch.device, autocast) -> float:
    """Mean loss in nats per token over the fixed validation windows."""
    total = 0.0
    for x, y in val.fixed(options.eval_iters, options.batch_size):
        with autocast:
            total += model(to_device(x, device), to_device(y, device))[1].item() * len(x)
    return total / options.eval_iters


def to_device(ids: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids).to(device)


def save(path: Path, checkpoint: dict) -> None:
    """Write to a temporary file and rename it: a kill at any moment leaves the old checkpoint or the new one."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(checkpoint, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(out_dir: str, device: torch.device) -> tuple[dict, ExoFormer]:
    """out_dir's checkpoint and its model. Raises UserError where there is none, or something else."""
    path = Path(out_dir) / "checkpoint.pt"
    if not path.exists():
        raise UserError(f"--out_dir={out_dir}: no {path}, train first")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        model = ExoFormer(Config(**checkpoint["config"])).to(device)
        model.load_state_dict(checkpoint["model"])
    except Exception as error:
        raise UserError(f"{path} is no checkpoint of train.py: {first_line(error)}") from None
    return checkpoint, model


# ---------------------------------------------------------------------------------------------------------------------
# Training

def make_model(options: Options, vocab_size: int) -> ExoFormer:
    """A fresh model of the variant, sizes and axes that the options name."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    overrides = {f.name: given[f.name] for f in fields(Config) if f.name in given}
    try:
        config = Config.variant(options.variant, vocab_size=vocab_size, **overrides)
    except ValueError as error:
        raise UserError(error) from None
    torch.manual_seed(options.seed)
    return ExoFormer(config)


def set_up(given: dict) -> tuple[Options, torch.device, dict | None, ExoFormer | None]:
    """All options, the device and, to resume, the checkpoint and its model.

    What no flag says, the checkpoint's options say, or, from scratch, the device's defaults.
    """
    options = Options(**given)
    device = pick_device(options.device)
    if options.init_from == "scratch":
        return Options(**DEFAULTS[device.type] | given), device, None, None
    if options.init_from != "resume":
        raise UserError(f"--init_from={options.init_from}: expected scratch or resume")
    checkpoint, model = load_checkpoint(options.out_dir, device)
    saved = checkpoint["options"]
    for name in given.keys() & (checkpoint["config"].keys() | {"variant", "dataset"}):
        has = checkpoint["config"].get(name, saved[name])
        if given[name] not in (has, saved[name]):
            raise UserError(f"--{name}={given[name]}: {options.out_dir} has {has}, drop the flag or train from scratch")
    return Options(**saved | dict(out_dir=options.out_dir, device=options.device) | given), device, checkpoint, model


def train(given: dict) -> float:
    """Train, or only evaluate, as the given flags say. Returns the last validation loss."""
    options, device, checkpoint, model = set_up(given)
    dtype = pick_dtype(options.dtype, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    first = checkpoint["step"] if checkpoint else 0
    if first >= options.max_iters and not options.eval_only:
        raise UserError(f"--max_iters={options.max_iters}: {options.out_dir} has done {first} steps, give a larger one")
    meta, train_split, val_split = load_data(options.dataset, options.block_size)
    model = model or make_model(options, meta["vocab_size"]).to(device)
    if meta["vocab_size"] != model.config.vocab_size:
        raise UserError(f"{meta['name']} has vocab_size={meta['vocab_size']}, the checkpoint in {options.out_dir} "
                        f"{model.config.vocab_size}: make the data again or train from scratch")
    total, hidden = model.num_params()
    print(f"{options.variant}, {total:,} parameters ({hidden:,} without embedding and head), on {meta['name']}, "
          f"{len(train_split.tokens):,} tokens, on {device} in {dtype}, from step {first}")
    if options.eval_only:
        return evaluate(model, val_split, options, device, autocast)

    optimizers = make_optimizers(model, options, device)
    for optimizer, state in zip(optimizers, checkpoint["optimizers"] if checkpoint else ()):
        optimizer.load_state_dict(state)
    optimizers[0].param_groups[0]["weight_decay"] = options.weight_decay        # a flag, whatever the checkpoint had
    net = model
    if options.compile or options.compile is None and device.type == "cuda":
        x, y = train_split.batch(options.batch_size, options.seed, 0)
        net = compiled(model, to_device(x, device), to_device(y, device), autocast)

    out = Path(options.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    batch_size, seconds = options.batch_size * options.gradient_accumulation_steps, 0.0
    bar = tqdm(range(first, options.max_iters), initial=first, total=options.max_iters, desc="train")
    with bar, open_log(out / "log.csv", first) as log_file:
        log = csv.writer(log_file)
        for step in bar:
            start = time.perf_counter()
            factor = lr_factor(step, options.max_iters, options.warmup_iters)
            for optimizer, peak in zip(optimizers, (options.muon_lr, options.adamw_lr)):
                optimizer.param_groups[0]["lr"] = peak * factor
            x, y = (to_device(ids, device) for ids in train_split.batch(batch_size, options.seed, step))
            loss = 0.0                                                          # the mean over all micro-batches
            for x_micro, y_micro in zip(x.split(options.batch_size), y.split(options.batch_size)):
                with autocast:
                    micro_loss = net(x_micro, y_micro)[1] / options.gradient_accumulation_steps
                micro_loss.backward()
                loss += micro_loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip or math.inf)
            loss, norm = torch.stack((loss, norm)).tolist()                     # the one wait for the GPU in a step
            require_finite(loss, "loss", step, optimizers)
            require_finite(norm, "gradient norm", step, optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seconds += time.perf_counter() - start                              # evaluation and saving are not counted

            done, val_loss = step + 1, None
            if done % options.eval_interval == 0 or done == options.max_iters:
                val_loss = evaluate(model, val_split, options, device, autocast)
                require_finite(val_loss, "validation loss", step, optimizers)   # before it replaces a good checkpoint
                bar.write(f"step {done}: validation loss {val_loss:.4f}")
            if done % options.log_interval == 0 or val_loss is not None:
                speed = batch_size * options.block_size * (done - first) / seconds
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                log.writerow((done, loss, val_loss, factor, norm, round(speed)))
                log_file.flush()                                                # a kill loses nothing before the save
            if val_loss is not None:
                save(out / "checkpoint.pt", dict(
                    step=done, val_loss=val_loss, config=asdict(model.config), options=asdict(options), dataset=meta,
                    model=model.state_dict(), optimizers=[optimizer.state_dict() for optimizer in optimizers]))
    return val_loss


def require_finite(value: float, what: str, step: int, optimizers: list[torch.optim.Optimizer]) -> None:
    if not math.isfinite(value):
        muon_lr, adamw_lr = (optimizer.param_groups[0]["lr"] for optimizer in optimizers)
        raise UserError(f"{what} {value} in step {step + 1} at muon_lr={muon_lr:.3g}, adamw_lr={adamw_lr:.3g}: "
                        "expected a finite number, lower the rates")


def open_log(path: Path, first: int):
    """log.csv to write on: new, or for a resumed run with the rows up to step `first`, the checkpoint's."""
    header = ["step", "train_loss", "val_loss", "lr_factor", "grad_norm", "tokens_per_second"]
    rows = list(csv.reader(path.open(newline="", encoding="utf-8")))[1:] if first and path.exists() else []
    file = path.open("w", newline="", encoding="utf-8")
    csv.writer(file).writerows([header] + [row for row in rows if int(row[0]) <= first])
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

def sample(options: Options) -> None:
    """Print the prompt `options.sample` and its continuation, token by token, by out_dir's checkpoint."""
    device = pick_device(options.device)
    checkpoint, model = load_checkpoint(options.out_dir, device)
    if checkpoint["dataset"]["tokenizer"] != "bytes":
        raise UserError(f"--sample with the tokenizer {checkpoint['dataset']['tokenizer']!r}: expected 'bytes'")
    idx = torch.tensor([list(options.sample.encode() or b"\n")], device=device)
    generator = torch.Generator(device).manual_seed(options.seed)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode            # a character may span several tokens
    print(options.sample, end="")
    for token in model.stream(idx, options.max_new_tokens, options.temperature, generator=generator):
        print(decode(bytes([token.item()])), end="", flush=True)
    print()


def main(argv: list[str]) -> int:
    try:
        given = parse(argv)
        if "sample" in given:
            sample(Options(**given))
            return 0
        val_loss = train(given)
        print(f"validation loss {val_loss:.4f} nats per token, perplexity {math.exp(val_loss):.3f}")
        if not given.get("eval_only"):
            print("a sample:")
            sample(Options(**given | dict(sample="\n")))
        return 0
    except (UserError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")                  # not the code page of a redirection
    sys.exit(main(sys.argv[1:]))
