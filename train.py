"""
Train an ExoFormer on one CUDA GPU or on the CPU.

    python train.py                                   the main job: exoformer-dynamic on Python's own standard library
    python train.py --variant=gated --max_iters=300   any flag below, --key=value or --key value
    python train.py --init_from=resume                go on from out_dir's last.pt, exactly as if it had never stopped
    python train.py --sample="def main("              no training: continue a prompt with out_dir's best.pt

Reads top to bottom: options -> optimizers -> device -> files -> training -> sampling.
The loop is `train`, one step of it `training_step`.
"""

import argparse
import codecs
import math
import re
import shlex
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.prepare import Split, UserError, load as load_data, replacing, require_same
from exoformer import Config, ExoFormer

# ---------------------------------------------------------------------------------------------------------------------
# Options: nanoGPT's names. Every field of Options and of exoformer.Config is a flag; a preset is a row of their values

PRESETS = {
    "cpu": dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, max_iters=750, warmup_iters=40),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=2500, warmup_iters=100),
    "shakespeare-cpu": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=16, max_iters=124, warmup_iters=4, decay_share=0.5,
        muon_lr=0.04, adamw_lr=0.02, momentum=0.85, eval_interval=62, eval_iters=0, dataset="shakespeare",
        variant="exoformer"),
    "shakespeare-gpu": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=1000, warmup_iters=50,
        muon_lr=0.01, eval_interval=100, eval_iters=0, dataset="shakespeare"),
}


def flag(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    preset: str = flag(None, "cpu, gpu, shakespeare-cpu or shakespeare-gpu (default: cpu or gpu, by the device)")
    variant: str = flag("exoformer-dynamic", "a system of exoformer.VARIANTS")
    dataset: str = flag("pystdlib", "a folder below data/, or the path of any folder with train.bin and val.bin")
    out_dir: str = flag("out", "where last.pt, best.pt and log.csv go")
    init_from: str = flag("scratch", "scratch, or resume: go on from out_dir's last.pt")
    sample: str = flag(None, "continue this prompt with out_dir's best.pt instead of training")
    max_new_tokens: int = flag(400, "of a sample")
    temperature: float = flag(0.8, "of a sample; 0 always takes the likeliest token")
    eval_only: bool = flag(False, "evaluate once and leave")
    eval_interval: int = flag(250, "steps between evaluations, each followed by a checkpoint")
    eval_iters: int = flag(256, "validation windows of block_size tokens, spread evenly over the split; 0 for all")
    log_interval: int = flag(10, "steps between rows of log.csv")
    batch_size: int = flag(8, "sequences per micro-batch")
    gradient_accumulation_steps: int = flag(1, "micro-batches per step")
    max_iters: int = flag(750, "optimizer steps")
    warmup_iters: int = flag(40, "steps of linear warm-up")
    decay_share: float = flag(0.2, "share of all steps, the last ones, in which the rates fall linearly to a tenth")
    muon_lr: float = flag(0.006, "peak rate of Muon, for the hidden matrices")
    adamw_lr: float = flag(0.003, "peak rate of AdamW, for everything else")
    momentum: float = flag(0.95, "of Muon")
    weight_decay: float = flag(0.1, "of Muon; AdamW has none")
    grad_clip: float = flag(1.0, "largest norm of the whole gradient, 0 for no limit")
    device: str = flag("auto", "auto, cpu, cuda, cuda:1 ...")
    dtype: str = flag("auto", "auto, float32 or bfloat16 (autocast; the weights stay float32)")
    compile: bool = flag(None, "use torch.compile (default: on CUDA only)")
    seed: int = flag(1337, "of initialisation, batches and the sample")


MODEL_FLAGS = {f.name for f in fields(Config)}


def boolean(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))         # ValueError for anything else


def parse(argv: list[str]) -> dict:
    """The flags that are given. Raises UserError for an unknown one, a wrong type and a number out of range."""
    def fail(message: str):                     # one line for main to print, instead of argparse's whole usage
        raise UserError(f"{message}: see --help")

    parser = argparse.ArgumentParser("train.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS)
    parser.error, flags = fail, fields(Options) + fields(Config)
    for f in flags:
        about = f.metadata.get("help", "of the model, see exoformer.Config and VARIANTS")
        defaults = [str(f.default)] if f.metadata and f.default is not None else []
        defaults += [f"{row[f.name]} in {name}" for name, row in PRESETS.items() if f.name in row]
        parser.add_argument(f"--{f.name}", type=boolean if f.type is bool else f.type, metavar=f.type.__name__,
                            help=about + (f" (default: {', '.join(defaults)})" if defaults else ""),
                            **dict(nargs="?", const=True) if f.type is bool else {})
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        near = get_close_matches(unknown[0].lstrip("-").split("=")[0], [f.name for f in flags], 1)
        fail(f"{unknown[0]!r} is no flag" + (f", did you mean --{near[0]}" if near else ""))
    at_least_0 = ("max_new_tokens", "eval_iters", "warmup_iters", "seed", "anchor_layer")
    for name, value in vars(values).items():
        smallest = 0 if type(value) is float or name in at_least_0 else 1
        if type(value) in (int, float) and not smallest <= value < (math.inf if type(value) is float else 2**63):
            raise UserError(f"--{name}={value}: expected {smallest} or more, and finite")       # a nan is neither
    return vars(values)


def settle(given: dict, checkpoint: dict | None, device: torch.device) -> tuple[Options, dict]:
    """(all options, the model's flags): what is not given comes from the checkpoint, or without one from the preset."""
    if checkpoint is None:
        preset = given.get("preset", "gpu" if device.type == "cuda" else "cpu")
        if preset not in PRESETS:
            raise UserError(f"--preset={preset}: expected one of {', '.join(PRESETS)}")
        values = PRESETS[preset] | given | dict(preset=preset)
    else:
        saved = checkpoint["config"] | checkpoint["options"]
        for name, value in given.items():
            if name not in ("init_from", "eval_only") and value != saved[name]:
                if name in MODEL_FLAGS | {"variant", "preset"}:
                    raise UserError(f"--{name}={value}: the checkpoint has {saved[name]}, drop the flag or train from "
                                    "scratch")
                print(f"changed since the checkpoint: {name} from {saved[name]} to {value}")
        values = saved | dict(device=Options.device, out_dir=Options.out_dir) | given
    flags = {name: values.pop(name) for name in MODEL_FLAGS & values.keys()}
    return Options(**values), flags


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers: Muon for the hidden matrices, AdamW for the rest, one schedule for both

def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly U Vᵀ of each matrix's SVD U Σ Vᵀ, g [k, rows, cols]: Newton–Schulz moves every singular value towards 1.

    Each round maps σ to a σ + b σ³ + c σ⁵. That is steep at 0, so that five rounds bring all but the smallest near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    if g.size(1) > g.size(2):
        return orthogonalise(g.mT, steps).mT                            # the smaller Gram matrix
    x = g / g.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)            # all σ <= 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)   # a x + (b gram + c gram²) x
    return x


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
    muon = ("*.W.?.weight", "*.W_*.weight", "*.W1.weight", "*.W2.weight")               # of layers and anchors
    adamw = ("embed.weight", "W_head.weight", "*norm*.weight", "*.lam.*", "*.bias")     # λ whatever its rank
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
    optimizers = [Muon(matrices, options.muon_lr, options.momentum, options.weight_decay, dtype),
                  torch.optim.AdamW(others, lr=options.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    for group in param_groups(optimizers):
        group["peak_lr"] = group["lr"]              # one schedule multiplies the peak rates of all groups
    return optimizers


def param_groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """What the optimizers remember of each parameter, by its name. Rates and other settings are not in it."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: dict(state) for optimizer in optimizers for p, state in optimizer.state.items()}


def load_optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer], saved: dict) -> None:
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"] if names[p] in saved):
            optimizer.state[p] = {key: value.to(p.device) for key, value in saved.pop(names[p]).items()}


def lr_factor(step: int, max_iters: int, warmup_iters: int, decay_share: float) -> float:
    """What multiplies all peak rates in step 0, 1, ...: linear warm-up, 1, then linearly to 0.1 in the last step."""
    warmup = (step + 1) / max(1, warmup_iters)
    decay = 0.1 + 0.9 * (max_iters - 1 - step) / max(1, round(decay_share * max_iters))
    return min(1.0, warmup, decay)


# ---------------------------------------------------------------------------------------------------------------------
# Device: precision, speed, compilation

# dense bfloat16, by a part of the device's name; the first that fits counts
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
              "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


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
    if name == "auto":
        name = "bfloat16" if native_bfloat16(device) else "float32"
    if name == "float32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")                              # TF32 where the GPU has it
    return name


def peak_flops(device: torch.device, dtype: str) -> float:
    """What model FLOPs are measured against; nan for a device that the table does not know, and for float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return math.nan
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), math.nan)


def compiled(model: nn.Module, x: Tensor, y: Tensor, autocast) -> nn.Module:
    """torch.compile(model), or the model itself with a warning: compilation happens, and fails, at the first call."""
    try:
        net = torch.compile(model)
        with autocast:
            loss = net(x, y)[1]
        loss.backward()
    except Exception as error:
        print("warning:", UserError(f"torch.compile failed, going on without it: {error}"), file=sys.stderr)
        net = model
    model.zero_grad(set_to_none=True)
    return net


# ---------------------------------------------------------------------------------------------------------------------
# Files of a run: checkpoints and the log

LOG_COLUMNS = "step,train_loss,val_loss,lr_factor,grad_norm,seconds,tokens_per_second"
FORMAT = 2              # 1 had other parameter names


def save(path: Path, checkpoint: dict) -> None:
    """Put the checkpoint in path's place, whole or not at all."""
    try:
        with replacing(path) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:                            # torch wraps what the disk says
        raise UserError(f"{path} is not saved, the one before is left as it was: {error}") from None


def load_checkpoint(path: Path) -> tuple[dict, ExoFormer]:
    """The checkpoint at path and its model, on the CPU. Raises UserError where there is none, or something else."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise ValueError(f"its format is {checkpoint['format']}, expected {FORMAT}, train again")
        model = ExoFormer(Config(**checkpoint["config"]))
        model.load_state_dict(checkpoint.pop("model"))                  # popped: nothing is kept twice
    except FileNotFoundError:
        raise UserError(f"{path} is not there: train first, or name a run's --out_dir") from None
    except Exception as error:
        raise UserError(f"{path} is damaged or no checkpoint of train.py: {error}") from None
    return checkpoint, model


def open_log(out: Path, first: int):
    """log.csv to write on: new, or for a resumed run with the rows up to step `first`, the checkpoint's."""
    path, kept = out / "log.csv", []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("last.pt", "best.pt", "log.csv"):                          # of a run that was killed while saving
            (out / f"{name}.tmp").unlink(missing_ok=True)
        if first and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]
            kept = [line for line in lines if line.endswith("\n") and int(line.split(",")[0]) <= first]    # one is torn
        with replacing(path) as file:
            file.write("".join([f"{LOG_COLUMNS}\n", *kept]).encode())
        return path.open("a", encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"--out_dir={out}: cannot write there ({error}), name another folder") from None


# ---------------------------------------------------------------------------------------------------------------------
# Training: set up, then the loop; what it calls stands between the two

@dataclass
class Run:
    """What set_up makes, and how far the loop has come."""
    options: Options
    flags: dict                         # the model's
    device: torch.device
    autocast: torch.autocast
    peak_flops: float                   # of the device, nan where unknown
    data: dict                          # the data set's description
    train_split: Split
    val_split: Split
    model: ExoFormer
    optimizers: list[torch.optim.Optimizer]
    step: int                           # steps done
    seconds: float                      # of training so far
    best_loss: float
    logged: tuple[int, float]           # step and seconds at the last row of the log

    @property
    def out(self) -> Path:
        return Path(self.options.out_dir)


def set_up(given: dict) -> Run:
    """The run that the given flags ask for, from scratch or from its checkpoint. Raises UserError."""
    device = pick_device(given.get("device", "auto"))
    init_from = given.get("init_from", Options.init_from)
    if init_from not in ("scratch", "resume"):
        raise UserError(f"--init_from={init_from}: expected scratch or resume")
    checkpoint, model = None, None
    if init_from == "resume":
        checkpoint, model = load_checkpoint(Path(given.get("out_dir", Options.out_dir)) / "last.pt")
    options, flags = settle(given, checkpoint, device)
    data, train_split, val_split = load_data(options.dataset, flags["block_size"], flags.get("vocab_size"))
    if checkpoint:
        require_same(data, checkpoint["data"])
    else:
        torch.manual_seed(options.seed)
        try:
            model = ExoFormer(Config.variant(options.variant, **dict(vocab_size=data["vocab_size"]) | flags))
        except ValueError as error:
            raise UserError(error) from None
    model.to(device)
    optimizers = make_optimizers(model, options, device)
    if checkpoint:
        load_optimizer_state(model, optimizers, checkpoint.pop("optimizer_state"))
    begin = checkpoint or dict(step=0, seconds=0.0, best_loss=math.inf)
    step, seconds, best_loss = begin["step"], begin["seconds"], begin["best_loss"]
    dtype = pick_dtype(options.dtype, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    total, hidden = model.num_params()
    print(f"{options.variant}, {total:,} parameters ({hidden:,} without embedding and head), on {options.dataset}, "
          f"{len(train_split.tokens):,} tokens, on {device} in {dtype}, from step {step}")
    return Run(options, flags, device, autocast, peak_flops(device, dtype), data, train_split, val_split, model,
               optimizers, step, seconds, best_loss, logged=(step, seconds))


def fetch(split: Split, options: Options, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The step's inputs and targets, int64 [micro-batches × batch_size, block_size]; a copy to a GPU does not wait."""
    x, y = split.batch(options.batch_size * options.gradient_accumulation_steps, options.seed, step)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    if device.type == "cuda":
        x, y = (ids.pin_memory().to(device, non_blocking=True) for ids in (x, y))
    return x, y


def training_step(net: nn.Module, x: Tensor, y: Tensor, step: int, optimizers: list[torch.optim.Optimizer],
                  options: Options, autocast) -> tuple[float, float]:
    """One step of all optimizers on x and y [micro-batches × batch_size, T]: (mean loss, norm of the gradient).

    Raises UserError where one of the two is not finite, before any weight changes.
    """
    factor = lr_factor(step, options.max_iters, options.warmup_iters, options.decay_share)
    for group in param_groups(optimizers):
        group["lr"] = group["peak_lr"] * factor
    loss = 0.0                                                          # the mean over all micro-batches
    for x_micro, y_micro in zip(x.split(options.batch_size), y.split(options.batch_size)):
        with autocast:
            micro_loss = net(x_micro, y_micro)[1] / options.gradient_accumulation_steps
        micro_loss.backward()
        loss += micro_loss.detach()
    norm = nn.utils.clip_grad_norm_(net.parameters(), options.grad_clip or math.inf)
    loss, norm = torch.stack((loss, norm)).tolist()                     # the one wait for a GPU
    require_finite({"loss": loss, "gradient norm": norm}, step, options)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss, norm


def require_finite(values: dict[str, float], step: int, options: Options) -> None:
    if not all(math.isfinite(value) for value in values.values()):
        found = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        raise UserError(f"step {step + 1}: {found} with muon_lr {options.muon_lr:.3g} and adamw_lr "
                        f"{options.adamw_lr:.3g}: expected finite numbers, lower the rates (the checkpoints are as they were)")


@torch.no_grad()
def evaluate(model: ExoFormer, val: Split, options: Options, device: torch.device, autocast) -> float:
    """Mean loss in nats per token over the fixed validation windows. Draws nothing, so training cannot notice it."""
    was_training = model.training
    model.eval()
    losses = []
    for x, y in val.fixed(options.eval_iters, options.batch_size):
        with autocast:
            loss = model(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))[1]
        losses += [loss.item()] * len(x)                                # the last batch may be smaller
    model.train(was_training)
    return sum(losses) / len(losses)


def log_row(run: Run, file, loss: float, norm: float, val_loss: float | None) -> str:
    """Write a row of log.csv; returns what the progress bar says. Speed is the mean since the row before."""
    options, (step, seconds) = run.options, run.logged
    step_time = (run.seconds - seconds) / (run.step - step)
    tokens = options.batch_size * options.gradient_accumulation_steps * run.model.config.block_size
    speed = tokens / step_time
    mfu = speed * run.model.flops_per_token() / run.peak_flops
    factor = lr_factor(run.step - 1, options.max_iters, options.warmup_iters, options.decay_share)
    row = run.step, loss, "" if val_loss is None else val_loss, factor, norm, run.seconds, round(speed)
    print(*row, sep=",", file=file, flush=True)
    run.logged = run.step, run.seconds
    return (f"loss {loss:.3f}, {1000 * step_time:,.0f} ms/step, {speed:,.0f} tokens/s, "
            f"MFU {'n/a' if math.isnan(mfu) else f'{mfu:.0%}'}")


def save_checkpoints(run: Run, val_loss: float | None) -> None:
    """Put the run into last.pt, and into best.pt if val_loss is the lowest so far, or nothing was saved before."""
    improved = run.best_loss == math.inf
    if val_loss is not None:
        improved = val_loss < run.best_loss
        run.best_loss = min(val_loss, run.best_loss)
    checkpoint = dict(
        format=FORMAT, step=run.step, seconds=run.seconds, val_loss=val_loss, best_loss=run.best_loss, data=run.data,
        config=asdict(run.model.config), options=asdict(run.options) | run.flags, model=run.model.state_dict(),
        optimizer_state=optimizer_state(run.model, run.optimizers))
    for name in ("best", "last") if improved else ("last",):
        save(run.out / f"{name}.pt", checkpoint)


@contextmanager
def first_signal():
    """A list that gets the first SIGINT or SIGTERM. The second one, and any after the block, have their usual effect.

    Signals reach the main thread alone: in another one the list stays empty.
    """
    caught, before = [], {}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def catch(number, frame):
        caught.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        restore()


def train(given: dict) -> float | None:
    """Train, or only evaluate, as the given flags say. Returns the last validation loss; None if there is nothing to do.

    Raises UserError, and SystemExit(130 or 143) after a signal, once the step is done and saved.
    """
    run = set_up(given)
    options, model = run.options, run.model
    if options.eval_only:
        val_loss = evaluate(model, run.val_split, options, run.device, run.autocast)
        print(f"validation loss {val_loss:.4f} nats per token, perplexity {math.exp(val_loss):.3f}")
        return val_loss
    if run.step >= options.max_iters:
        print(f"the run in {run.out} has done its {run.step} steps: to extend it, resume with "
              f"--max_iters={2 * run.step}")
        return None

    x, y = fetch(run.train_split, options, run.step, run.device)
    net = model                                                 # what trains; what is saved stays `model`
    if options.compile or options.compile is None and run.device.type == "cuda":
        net = compiled(model, x[:options.batch_size], y[:options.batch_size], run.autocast)
    steps = tqdm(range(run.step, options.max_iters), initial=run.step, total=options.max_iters)
    with first_signal() as stopped, open_log(run.out, run.step) as log, steps as bar:
        for step in bar:
            start = time.perf_counter()
            loss, norm = training_step(net, x, y, step, run.optimizers, options, run.autocast)
            x, y = fetch(run.train_split, options, step + 1, run.device)    # while a GPU is at its optimizers
            run.seconds += time.perf_counter() - start                      # nothing below is counted
            run.step = step + 1

            val_loss = None
            last = run.step == options.max_iters
            due = last or run.step % options.eval_interval == 0
            if due:
                val_loss = evaluate(model, run.val_split, options, run.device, run.autocast)
                require_finite({"validation loss": val_loss}, step, options)    # or it would replace a good checkpoint
            if due or run.step % options.log_interval == 0:
                bar.set_postfix_str(log_row(run, log, loss, norm, val_loss), refresh=False)
            if due or stopped:
                save_checkpoints(run, val_loss)                 # behind the row: a kill between them loses no row
            if due:
                bar.write(f"step {run.step}: validation loss {val_loss:.4f}")
            if stopped and not last:
                again = [f"--{name}={value}" for name, value in (given | dict(init_from="resume")).items()]
                print(f"stopped after step {run.step}; resume with: {shlex.join(['python', sys.argv[0], *again])}")
                raise SystemExit(128 + stopped[0])
    finish(run, val_loss)
    return val_loss


def finish(run: Run, val_loss: float) -> None:
    """What a run ends with: its loss, how much of each mix comes from the anchors, a sample."""
    print(f"validation loss {val_loss:.4f} nats per token, perplexity {math.exp(val_loss):.3f}, "
          f"best {run.best_loss:.4f}; {run.seconds:.0f} s of training")
    idx = torch.from_numpy(next(run.val_split.fixed(8, 8))[0]).to(run.device)
    shares = anchor_shares(run.model.eval(), idx)
    if shares:
        print("the anchors' share of each mix, by norm:")
    for layer, of in shares.items():
        print(f"  layer {layer}: " + ", ".join(f"{s} {share:.0%}" for s, share in of.items()))
    if run.data["tokenizer"] == "bytes":
        print("a sample:")
        sample(replace(run.options, sample="\n"))


# ---------------------------------------------------------------------------------------------------------------------
# What was learned

@torch.no_grad()
def anchor_shares(model: ExoFormer, idx: Tensor) -> dict[int, dict[str, float]]:
    """Per layer and component mean ‖λ1 γ1 ⊙ anchor‖ / (‖λ1 γ1 ⊙ anchor‖ + ‖λ2 γ2 ⊙ own‖), over tokens and heads.

    1 where a mix is its anchor alone, 0 where it is the layer's own projection. Only layers that mix have a row.
    """
    layers = {block.attn.mixing: n for n, block in enumerate(model.blocks, 1) if block.attn.mixing is not None}
    shares = {n: {} for n in layers.values()}

    def measure(mixing, inputs, _):
        X, own, anchors = inputs
        for s, terms in mixing.terms(X, own, anchors).items():
            from_anchor, from_own = (term.norm(dim=-1) for term in terms)       # [B, T, h] each
            shares[layers[mixing]][s] = (from_anchor / (from_anchor + from_own)).mean().item()

    hooks = [mixing.register_forward_hook(measure) for mixing in layers]
    model(idx)
    for hook in hooks:
        hook.remove()
    return shares


def sample(options: Options) -> None:
    """Print the prompt `options.sample` and its continuation, token by token, by out_dir's best.pt."""
    device, path = pick_device(options.device), Path(options.out_dir) / "best.pt"
    checkpoint, model = load_checkpoint(path)
    if checkpoint["data"]["tokenizer"] != "bytes":
        raise UserError(f"{path} has the tokenizer {checkpoint['data']['tokenizer']}: --sample can only spell 'bytes'")
    idx = torch.tensor([list(options.sample.encode() or b"\n")], device=device)
    generator = torch.Generator(device).manual_seed(options.seed)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode            # a character may span several tokens
    print(options.sample, end="")
    for token in model.to(device).eval().stream(idx, options.max_new_tokens, options.temperature, generator=generator):
        print(decode(bytes([token.item()])), end="", flush=True)
    print()


def main(argv: list[str]) -> int:
    try:
        given = parse(argv)
        if "sample" in given:
            sample(Options(**{name: value for name, value in given.items() if name not in MODEL_FLAGS}))
        else:
            train(given)
        return 0
    except (UserError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)                                   # no traceback where nothing is at stake
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")                  # not the code page of a redirection
    sys.exit(main(sys.argv[1:]))
