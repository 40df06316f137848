"""
Train an ExoFormer on one CUDA GPU or on the CPU.

    python train.py                                   the main job: exoformer-dynamic on Python's own standard library
    python train.py --variant=gated --max_iters=300   any flag below, --key=value or --key value
    python train.py --init_from=resume                go on from out_dir's last.pt, exactly as if it had never stopped
    python train.py --init_from=FILE --dataset=my     fine-tune: a new run from the weights of a checkpoint
    python train.py --sample="def main("              no training: continue a prompt with out_dir's best.pt

Reads top to bottom: options -> optimizers -> device -> files -> training -> sampling.
The loop is `train`, one step of it `training_step`.
"""

import argparse
import codecs
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.prepare import Split, UserError, load as load_data, only_writer, replacing, require_same
from exoformer import VARIANTS, Config, ExoFormer

# ---------------------------------------------------------------------------------------------------------------------
# Options: nanoGPT's names. Every field of Options and of exoformer.Config is a flag; a preset is a row of their values

PAPER = dict(
    n_head=16, block_size=2048, batch_size=16, gradient_accumulation_steps=8, warmup_iters=1000, muon_lr=0.01,
    adamw_lr=0.003, z_loss=1e-5, eval_interval=1000, eval_iters=0, dataset="fineweb-edu")
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
    "450m": PAPER | dict(n_layer=29, n_embd=1024, max_iters=38147),
    "1b": PAPER | dict(n_layer=32, n_embd=1536, max_iters=76294),
}
UNGATED = {"450m": dict(n_layer=32), "1b": dict(n_layer=35)}        # whose layers are smaller: as many parameters again


COUNT, RATE = (1, 10**9), (0, 1000)         # ranges, both ends included


def flag(default, help: str, range: tuple | None = None, beside: str = ""):
    """A flag that acts in training, and beside --eval_only and --sample if `beside` names them."""
    return field(default=default, metadata=dict(help=help, range=range, beside=beside))


@dataclass
class Options:
    preset: str = flag(None, f"{', '.join(PRESETS)} (default: cpu or gpu, by the device)",
                       beside="eval_only")
    variant: str = flag("exoformer-dynamic", "a system of exoformer.VARIANTS", beside="eval_only")
    dataset: str = flag("pystdlib", "a folder below data/, or the path of any folder with train.bin and val.bin",
                        beside="eval_only")
    out_dir: str = flag("out", "where last.pt, best.pt and log.csv go, a folder for each run", beside="eval_only sample")
    init_from: str = flag("scratch", "scratch; resume: go on from out_dir's last.pt; or a checkpoint whose weights a new "
                          "run begins with", beside="eval_only")
    overwrite: bool = flag(False, "start from scratch where another run's files lie, and delete them")
    sample: str = flag(None, "no training: continue this prompt, or @FILE's text, with out_dir's best.pt", beside="sample")
    num_samples: int = flag(1, "samples of the prompt", COUNT, beside="sample")
    max_new_tokens: int = flag(400, "of a sample", (0, 10**9), beside="sample")
    temperature: float = flag(0.8, "of a sample; 0 always takes the likeliest token", (0, 1000), beside="sample")
    stop: str = flag(None, "a sample ends with this text", beside="sample")
    eval_only: bool = flag(False, "evaluate once and leave", beside="eval_only")
    eval_interval: int = flag(250, "steps between evaluations, each followed by a checkpoint", COUNT)
    eval_iters: int = flag(256, "validation windows of block_size tokens, spread evenly over the split; 0 for all",
                           (0, 10**9), beside="eval_only")
    log_interval: int = flag(10, "steps between rows of log.csv", COUNT)
    batch_size: int = flag(8, "sequences per micro-batch", COUNT, beside="eval_only")
    gradient_accumulation_steps: int = flag(1, "micro-batches per step", COUNT)
    max_iters: int = flag(750, "optimizer steps", COUNT)
    warmup_iters: int = flag(40, "steps of linear warm-up", (0, 10**9))
    decay_share: float = flag(0.2, "share of all steps, the last ones, in which the rates fall linearly to a tenth", (0, 1))
    muon_lr: float = flag(0.006, "peak rate of Muon, for the hidden matrices", RATE)
    adamw_lr: float = flag(0.003, "peak rate of AdamW, for everything else", RATE)
    momentum: float = flag(0.95, "of Muon; at 1 nothing would move", (0, 0.9999))
    weight_decay: float = flag(0.1, "of Muon; AdamW has none", (0, 100))
    grad_clip: float = flag(1.0, "largest norm of the whole gradient, 0 for no limit", (0, 10**9))
    z_loss: float = flag(0.0, "times the mean of log(sum of exp(logits))² is added to what is minimised", (0, 1000))
    device: str = flag("auto", "auto, cpu, cuda, cuda:1 ...", beside="eval_only sample")
    dtype: str = flag("auto", "auto, float32 or bfloat16 (autocast; the weights stay float32)", beside="eval_only")
    compile: bool = flag(None, "use torch.compile (default: on CUDA only)")
    seed: int = flag(1337, "of initialisation, batches and samples", (0, 2**63 - 1), beside="eval_only sample")


OPTIONS, MODEL_FLAGS = ({f.name: f for f in fields(of)} for of in (Options, Config))

NANOGPT = {                                 # its flags that have no counterpart of the same name
    "learning_rate": "--muon_lr and --adamw_lr", "min_lr": "--decay_share; rates end at a tenth",
    "lr_decay_iters": "--decay_share", "decay_lr": "--decay_share=0 for no decay", "beta1": "--momentum, of Muon",
    "beta2": "none: it is fixed at 0.95", "dropout": "none: there is no dropout", "bias": "none: there are no biases",
    "start": "--sample", "top_k": "--temperature", "always_save_checkpoint": "none: each evaluation saves last.pt",
    "wandb_log": "none: see log.csv", "wandb_project": "none: see log.csv", "wandb_run_name": "--out_dir",
    "backend": "none: one process uses one device, experiments/distributed.py several"}


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected true or false")
    return text.lower() == "true"


def parse(argv: list[str]) -> dict:
    """The flags that are given. Raises UserError for an unknown one and for a value of another type."""
    def fail(message: str):                     # one line for main to print, instead of argparse's whole usage
        raise UserError(f"{message}: see --help")

    parser = argparse.ArgumentParser("train.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS)
    parser.error = fail
    for f in (*OPTIONS.values(), *MODEL_FLAGS.values()):
        about = f.metadata.get("help", "of the model, see exoformer.Config")
        defaults = [str(f.default)] if f.default is not None else []
        defaults += [f"{row[f.name]} in {name}" for name, row in PRESETS.items() if f.name in row]
        defaults += ["or what --variant says"] if any(f.name in row for row in VARIANTS.values()) else []
        parser.add_argument(f"--{f.name}", type=boolean if f.type is bool else f.type,
                            metavar="true|false" if f.type is bool else f.type.__name__,
                            help=about + (f" (default: {', '.join(defaults)})" if defaults else ""),
                            **dict(nargs="?", const=True) if f.type is bool else {})
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise no_flag(unknown[0])
    return vars(values)


def no_flag(given: str) -> UserError:
    name = given.lstrip("-").split("=")[0]
    near = get_close_matches(name, OPTIONS | MODEL_FLAGS, 1)
    hint = f"nanoGPT's {name} is here {NANOGPT[name]}" if name in NANOGPT else f"did you mean --{near[0]}?" if near else ""
    return UserError(f"{given!r} is no flag, expected --name=value: {hint or 'see --help'}")


def require_sense(given: dict) -> None:
    """Raises UserError for names that are no flags, and for flags that have no effect in what is asked for."""
    for name in given.keys() - OPTIONS.keys() - MODEL_FLAGS.keys():
        raise no_flag(name)
    asked = [mode for mode in ("sample", "eval_only") if given.get(mode) not in (None, False)]
    if len(asked) == 2:
        raise UserError("--sample and --eval_only: expected one of them, drop the other")
    for name in given if asked else ():
        f = (OPTIONS | MODEL_FLAGS)[name]
        beside = f.metadata.get("beside", "eval_only sample" if name == "block_size" else "eval_only")
        if asked[0] not in beside:
            raise UserError(f"--{name} has no effect beside --{asked[0]}: drop one of the two")
    if given.get("overwrite") and given.get("init_from") == "resume":
        raise UserError("--overwrite has no effect beside --init_from=resume: drop one of the two")


def checked(options: Options) -> Options:
    """The same. Raises UserError unless each value has its type and lies in its range."""
    for name, f in OPTIONS.items():
        value, range = getattr(options, name), f.metadata["range"]
        kinds = (int, float) if f.type is float else (f.type,)
        if type(value) not in kinds and (value is not None or f.default is not None):
            raise UserError(f"--{name}={value!r}: expected {f.type.__name__}")
        if range and not range[0] <= value <= range[1]:                     # which a nan does not
            raise UserError(f"--{name}={value}: expected {range[0]} to {range[1]}")
    return options


def only(known: dict, values: dict) -> dict:
    return {name: value for name, value in values.items() if name in known}


def settle(given: dict, checkpoint: dict | None, device: torch.device) -> tuple[Options, Config]:
    """All options and the model's Config: what is not given comes from the checkpoint, or without one from the preset.

    A new run that begins with a checkpoint's weights takes its model from there, and its options from the preset.
    """
    resumed = given.get("init_from") == "resume"
    preset = given.get("preset", "gpu" if device.type == "cuda" else "cpu")
    if preset not in PRESETS and not resumed:
        raise UserError(f"--preset={preset}: expected one of {', '.join(PRESETS)}")
    try:
        if checkpoint is None:
            gate = given.get("gate", VARIANTS.get(given.get("variant", Options.variant), {}).get("gate", True))
            row = PRESETS[preset] | ({} if gate else UNGATED.get(preset, {})) | given | dict(preset=preset)
            options = checked(Options(**only(OPTIONS, row)))
            return options, Config.variant(options.variant, **only(MODEL_FLAGS, row))
        config = Config(**checkpoint["config"])
        wanted = replace(config, **only(MODEL_FLAGS, given))
    except ValueError as error:
        raise UserError(f"--{error}") from None

    saved = asdict(Options()) | only(OPTIONS, checkpoint["options"])    # a flag that it does not know has its default
    given = only(OPTIONS, given)
    has = asdict(config) | dict(variant=saved["variant"], preset=saved["preset"])
    asked = asdict(wanted) | dict(variant=given.get("variant", has["variant"]),
                                  preset=given.get("preset", has["preset"]) if resumed else has["preset"])
    for name, value in asked.items():
        if value != has[name]:
            raise UserError(f"--{name}={value}: the checkpoint has {has[name]}, drop the flag or train from scratch")
    if not resumed:
        row = only(OPTIONS, PRESETS[preset]) | given | dict(preset=preset, variant=saved["variant"])
        return checked(Options(**row)), config

    here = dict(device=Options.device, out_dir=Options.out_dir, eval_only=False, overwrite=False)   # not the run's
    for name, value in given.items():
        if name not in here | dict(init_from=None) and value != saved[name]:
            print(f"changed since the checkpoint: {name} from {saved[name]} to {value}")
    options = checked(Options(**saved | here | given))
    step, extended = checkpoint["step"], options.max_iters > saved["max_iters"]
    before = lr_factor(step - 1, saved["max_iters"], saved["warmup_iters"], saved["decay_share"])
    after = lr_factor(step, options.max_iters, options.warmup_iters, options.decay_share)
    if extended and after > before and not options.eval_only:
        print(f"the rates rise again, from {before:.2f} to {after:.2f} of their peaks: a longer run decays later")
    return options, config


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
    fast = native_bfloat16(device) and pick_dtype(options.dtype, device) == "bfloat16"
    dtype = torch.bfloat16 if fast else torch.float32
    optimizers = [Muon(matrices, options.muon_lr, options.momentum, options.weight_decay, dtype),
                  torch.optim.AdamW(others, lr=options.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    for group in param_groups(optimizers):
        group["peak_lr"] = group["lr"]              # one schedule multiplies the peak rates of all groups
    return optimizers


def param_groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """What the optimizers remember of each parameter, by its name. Rates and other settings are not in it."""
    state = {p: dict(of) for optimizer in optimizers for p, of in optimizer.state.items()}
    return {name: state.get(p, {}) for name, p in model.named_parameters()}


def load_optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer], saved: dict) -> None:
    """Raises UserError unless `saved` fits the model's parameters, by name and by shape."""
    shapes = {name: (p.shape, torch.Size()) for name, p in model.named_parameters()}    # () is AdamW's count of steps
    require_names("the checkpoint's optimizer_state is not of this model:", saved, shapes, "train again")
    for name, state in saved.items():
        for key, value in state.items():
            if value.shape not in shapes[name]:
                raise UserError(f"the checkpoint's optimizer_state of {name} has {key} of shape {list(value.shape)}: "
                                f"expected {list(shapes[name][0])}, train again")
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

# dense bfloat16, by the device's whole name: a laptop's GPU, a Ti or an NVL is another card than the one it is named after
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 NVL": 835e12,
              "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
              "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA L40S": 362e12,
              "NVIDIA L40": 181e12, "NVIDIA L4": 121e12, "NVIDIA GeForce RTX 4090": 165e12,
              "NVIDIA GeForce RTX 3090": 71e12}


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("mps"):
        raise UserError(f"--device={name}: not supported, as nobody could run it yet; use --device=cpu")
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
    if name == "float32" and device.type == "cuda" and native_bfloat16(device):
        torch.set_float32_matmul_precision("high")                              # TF32, which came with bfloat16
    return name


def peak_flops(device: torch.device, dtype: str) -> float:
    """What model FLOPs are measured against; nan for a device that the table does not know, and for float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return math.nan
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device), math.nan)


def compiled(model: nn.Module, x: Tensor, y: Tensor, autocast) -> nn.Module:
    """torch.compile(model), or the model itself with a warning: compilation happens, and fails, at the first call."""
    print("compiling, which takes a minute or so")
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


def require_memory(config: Config, batch_size: int, device: torch.device) -> None:
    """Raises UserError where the least that training needs is more than the device has. A lower bound, no prediction."""
    V, T, N, d = config.vocab_size, config.block_size, config.n_layer, config.n_embd
    weights = 12 * (2 * V * d + 10 * N * d**2)                      # bytes, with gradient and momentum
    activations = batch_size * T * (32 * N * d + 8 * V)             # in bfloat16; logits and their gradient in float32
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if weights + activations > has:
        raise UserError(f"--batch_size={batch_size} --block_size={T} --n_embd={d} --n_layer={N} --vocab_size={V} needs "
                        f"over {(weights + activations) / 2**30:,.0f} GiB, {device} has {has / 2**30:,.0f}: lower some")


# ---------------------------------------------------------------------------------------------------------------------
# Files of a run: checkpoints and the log

LOG_COLUMNS = "step,train_loss,val_loss,lr_factor,grad_norm,seconds,tokens_per_second"
LOG_ROW = re.compile(r"(\d+),[-+.\w]+,[-+.\w]*,[-+.\w]+,[-+.\w]+,[-+.\w]+,\d+\s*\n")
FORMAT = 2              # 1 had other parameter names
PARTS = dict(format=int, step=int, seconds=(int, float), val_loss=(float, type(None)), best_loss=float, data=dict,
             config=dict, options=dict, model=dict, optimizer_state=dict)           # of a checkpoint


def save(path: Path, checkpoint: dict) -> None:
    """Put the checkpoint in path's place, whole or not at all."""
    try:
        with replacing(path) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:                            # torch wraps what the disk says
        raise UserError(f"{path} is not saved, the one before is left as it was: {error}") from error


def load_checkpoint(path: Path, block_size: int | None = None) -> tuple[dict, ExoFormer]:
    """The checkpoint at path and its model, on the CPU, with a longer context if given.

    Raises UserError where there is none, or something else.
    """
    def damaged(reason) -> UserError:
        return UserError(f"{path} is damaged or no checkpoint of train.py: {reason}")

    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is not there: train first, or name a run's --out_dir") from None
    except Exception as error:
        raise damaged(error) from None
    if not isinstance(checkpoint, dict):
        raise damaged(f"it holds a {type(checkpoint).__name__}")
    if checkpoint.get("format") != FORMAT:
        raise damaged(f"its format is {checkpoint.get('format')}, expected {FORMAT}, train again")
    for part, kind in PARTS.items():
        if not isinstance(checkpoint.get(part, ...), kind):
            raise damaged(f"{part} is {checkpoint[part]!r:.40}" if part in checkpoint else f"it has no {part}")
    config = checkpoint["config"]
    foreign = [name for name in checkpoint if name not in PARTS]
    foreign += [name for name in checkpoint["options"] if name not in OPTIONS | MODEL_FLAGS]
    for name in foreign:
        print(f"warning: {path} has {name!r}, which train.py does not know: it is dropped", file=sys.stderr)
    changed = f"{path} was saved with another exoformer.py"
    for name in config:
        if name not in MODEL_FLAGS:
            raise UserError(f"{changed}, whose Config has {name!r}: take that file, or train again")
    try:
        config = Config(**config | ({} if block_size is None else dict(block_size=block_size)))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    trained = checkpoint["config"].get("block_size", Config.block_size)
    if config.block_size > trained:
        print(f"warning: {path} was trained on {trained} tokens of context, beyond them it may be lost", file=sys.stderr)
    checkpoint["config"] = asdict(config)
    model = ExoFormer(config)                                           # an error in it shows where it is
    weights = checkpoint.pop("model")                                   # popped: nothing is kept twice
    require_names(f"{changed}:", weights, model.state_dict(), "take that file, or train again")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{changed}: {' '.join(str(error).split())}") from None
    return checkpoint, model


def require_names(where: str, found, expected, remedy: str) -> None:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        lists = [f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
                 for what, names in (("it lacks", missing), ("it also has", extra)) if names]
        raise UserError(f"{where} {'; '.join(lists)}: {remedy}")


def require_free(out: Path, options: Options) -> None:
    """Raises UserError where out holds another run, unless that may be overwritten."""
    for path in (out / "last.pt", out / "best.pt"):
        if path.exists() and not options.overwrite:
            raise UserError(f"--out_dir={out} holds {path.name} of another run: go on with --init_from=resume, name "
                            "another --out_dir, or delete that run with --overwrite")


def log_rows(path: Path, first: int) -> list[str]:
    """The rows of a run's log.csv up to step `first`. Raises UserError for another file."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines(keepends=True) if path.exists() else []
    if lines and lines[0].strip() != LOG_COLUMNS:
        raise UserError(f"{path} does not begin with {LOG_COLUMNS}: it is not this program's, move it away")
    rows = [(line, LOG_ROW.fullmatch(line)) for line in lines[1:]]
    foreign = [line.strip() for line, row in rows[:-1] if not row]              # the last may be torn by a kill
    if first and foreign:
        print(f"warning: {path}: dropped {len(foreign)} rows that are not a run's: {foreign[0]!r}", file=sys.stderr)
    return [line.strip() for line, row in rows if row and int(row[1]) <= first]


def heal_best(run: "Run") -> None:
    """best.pt is saved behind last.pt. Where a kill came between the two, it is made up for."""
    if run.best_is_last or not (run.out / "best.pt").exists():
        with replacing(run.out / "best.pt") as best, open(run.out / "last.pt", "rb") as last:
            shutil.copyfileobj(last, best)


# ---------------------------------------------------------------------------------------------------------------------
# Output

class Lenient:
    """A stream that drops what a closed pipe, a dead terminal or a full disk does not take."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except (OSError, ValueError):                                   # ValueError: closed, or it cannot spell text
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass


@contextmanager
def lenient_output():
    """What is printed must not cost a step."""
    with redirect_stdout(Lenient(sys.stdout)), redirect_stderr(Lenient(sys.stderr)):
        yield


def report(val_loss: float) -> str:
    perplexity = torch.tensor(val_loss, dtype=torch.float64).exp()      # inf where it overflows
    return f"validation loss {val_loss:.4f} nats per token, perplexity {perplexity:.3f}"


def resume_command(run: "Run") -> str:
    """What resumes the run, from whatever folder it is pasted in."""
    here, data = Path(__file__).resolve(), run.train_split.path.resolve().parent
    words = [sys.executable, str(here), "--init_from=resume", f"--out_dir={run.out.resolve()}"]
    if data.parent != here.parent / "data":
        words.append(f"--dataset={data}")
    if run.options.device != Options.device:
        words.append(f"--device={run.options.device}")
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


# ---------------------------------------------------------------------------------------------------------------------
# Training: set up, then the loop; what it calls stands between the two

@dataclass
class Run:
    """What set_up makes, and how far the loop has come."""
    options: Options
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
    best_is_last: bool                  # whether no checkpoint was better than last.pt when it was saved

    @property
    def out(self) -> Path:
        return Path(self.options.out_dir)


def set_up(given: dict) -> Run:
    """The run that the given flags ask for: from scratch, from its checkpoint or from another's weights.

    Raises UserError. Has written nothing but data/pystdlib, where it was missing.
    """
    require_sense(given)
    device = pick_device(given.get("device", Options.device))
    init_from, checkpoint, model = given.get("init_from", Options.init_from), None, None
    if init_from == "resume":
        checkpoint, model = load_checkpoint(Path(given.get("out_dir", Options.out_dir)).expanduser() / "last.pt")
    elif init_from != "scratch":
        if not Path(init_from).expanduser().is_file():
            raise UserError(f"--init_from={init_from}: expected scratch, resume or the file of a checkpoint")
        checkpoint, model = load_checkpoint(Path(init_from).expanduser(), given.get("block_size"))
    options, config = settle(given, checkpoint, device)
    options.out_dir = str(Path(options.out_dir).expanduser())
    if init_from != "resume" and not options.eval_only:
        require_free(Path(options.out_dir), options)
        if Path(init_from).expanduser().resolve().parent == Path(options.out_dir).resolve():
            raise UserError(f"--init_from={init_from} lies in --out_dir, whose run would be deleted: name another --out_dir")
    vocab_size = config.vocab_size if checkpoint else given.get("vocab_size")
    data, train_split, val_split = load_data(options.dataset, config.block_size, vocab_size)
    if init_from == "resume":
        require_same(data, checkpoint["data"])
    torch.manual_seed(options.seed)
    if checkpoint is None:
        config = replace(config, vocab_size=vocab_size or data["vocab_size"])
        require_memory(config, options.batch_size, device)
        model = ExoFormer(config)
    model.to(device)
    optimizers = make_optimizers(model, options, device)
    step, seconds, best_loss, best_is_last = 0, 0.0, math.inf, False
    if init_from == "resume":
        step, seconds, best_loss = checkpoint["step"], checkpoint["seconds"], checkpoint["best_loss"]
        best_is_last = checkpoint["val_loss"] == best_loss
        load_optimizer_state(model, optimizers, checkpoint.pop("optimizer_state"))
    dtype = pick_dtype(options.dtype, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    total, hidden = model.num_params()
    print(f"{options.variant}, {total:,} parameters ({hidden:,} without embedding and head), on {options.dataset}, "
          f"{len(train_split.tokens):,} tokens, on {device} in {dtype}, from step {step}")
    return Run(options, device, autocast, peak_flops(device, dtype), data, train_split, val_split, model, optimizers,
               step, seconds, best_loss, (step, seconds), best_is_last)


def fetch(split: Split, options: Options, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The step's inputs and targets, int64 [micro-batches × batch_size, block_size]; a copy to a GPU does not wait."""
    ids = split.batch(options.batch_size * options.gradient_accumulation_steps, options.seed, step)
    x, y = (torch.from_numpy(part) for part in ids)
    if device.type == "cuda":                           # a slice that is pinned would be copied by way of unpinned memory
        x, y = (part.contiguous().pin_memory().to(device, non_blocking=True) for part in (x, y))
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
            logits, micro_loss = net(x_micro, y_micro)
        z = logits.float().logsumexp(-1).square().mean() if options.z_loss else 0     # keeps the logits from drifting
        ((micro_loss + options.z_loss * z) / options.gradient_accumulation_steps).backward()
        loss += micro_loss.detach() / options.gradient_accumulation_steps
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
    with tqdm(total=val.count(options.eval_iters), unit="window", disable=None if options.eval_only else True) as bar:
        for x, y in val.fixed(options.eval_iters, options.batch_size):
            with autocast:
                loss = model(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))[1]
            losses += [loss.item()] * len(x)                            # the last batch may be smaller
            bar.update(len(x))
    model.train(was_training)
    return sum(losses) / len(losses)


def log_row(run: Run, loss: float, norm: float, val_loss: float | None) -> str:
    """Append a row to log.csv; returns what the progress bar says. Speed is the mean since the row before."""
    options, (step, seconds) = run.options, run.logged
    step_time = (run.seconds - seconds) / (run.step - step)
    tokens = options.batch_size * options.gradient_accumulation_steps * run.model.config.block_size
    speed = tokens / step_time
    mfu = speed * run.model.flops_per_token() / run.peak_flops
    factor = lr_factor(run.step - 1, options.max_iters, options.warmup_iters, options.decay_share)
    row = run.step, loss, "" if val_loss is None else val_loss, factor, norm, run.seconds, round(speed)
    try:
        with open(run.out / "log.csv", "a", encoding="utf-8", newline="") as file:
            print(*row, sep=",", file=file)
    except OSError as error:                                # a full disk, or a spreadsheet that has locked it
        print(f"warning: step {run.step} is not in {run.out / 'log.csv'}: {error}", file=sys.stderr)
    run.logged = run.step, run.seconds
    return (f"loss {loss:.3f}, {1000 * step_time:,.0f} ms/step, {speed:,.0f} tokens/s, "
            f"MFU {'n/a' if math.isnan(mfu) else f'{mfu:.0%}'}")


def save_checkpoints(run: Run, val_loss: float | None, last: bool) -> None:
    """Put the run into last.pt, and into best.pt if val_loss is the lowest so far, or nothing was saved before.

    A file that another program holds is a warning, as the next save may do it; a UserError if this is the last.
    """
    best_before = run.best_loss
    improved = best_before == math.inf
    if val_loss is not None:
        improved = val_loss < run.best_loss
        run.best_loss = min(val_loss, run.best_loss)
    checkpoint = dict(
        format=FORMAT, step=run.step, seconds=run.seconds, val_loss=val_loss, best_loss=run.best_loss, data=run.data,
        config=asdict(run.model.config), options=asdict(run.options), model=run.model.state_dict(),
        optimizer_state=optimizer_state(run.model, run.optimizers))
    for name in ("last", "best") if improved else ("last",):
        try:
            save(run.out / f"{name}.pt", checkpoint)
        except UserError as error:
            if last or not isinstance(error.__cause__, PermissionError):
                raise
            print(f"warning: {error}", file=sys.stderr)
            if name == "best":
                run.best_loss = best_before             # so that the next one that is better than the file is saved


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def first_signal():
    """A list that gets the first SIGINT, SIGTERM or SIGHUP. The second one, and any after the block, have their usual
    effect; one that is ignored (SIGHUP under nohup) stays ignored.

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
        before = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, catch)
    try:
        yield caught
    finally:
        restore()


@lenient_output()
def train(given: dict) -> float | None:
    """Train, or only evaluate, as the given flags say. Returns the last validation loss; None if there is nothing to do.

    Raises UserError, and SystemExit(129, 130 or 143) after a signal, once the step is done and saved.
    """
    run = set_up(given)
    options, model = run.options, run.model
    if options.eval_only:
        val_loss = evaluate(model, run.val_split, options, run.device, run.autocast)
        print(report(val_loss))
        return val_loss
    if run.step >= options.max_iters:
        print(f"the run in {run.out} has done its {run.step} steps: to extend it, resume with "
              f"--max_iters={2 * run.step} (the rates rise again)")
        return None

    x, y = fetch(run.train_split, options, run.step, run.device)
    net = model                                                 # what trains; what is saved stays `model`
    if options.compile or options.compile is None and run.device.type == "cuda":
        net = compiled(model, x[:options.batch_size], y[:options.batch_size], run.autocast)
    steps = tqdm(range(run.step, options.max_iters), initial=run.step, total=options.max_iters, disable=None)
    with first_signal() as stopped, run_folder(run), steps as bar:      # disable=None: no bar in a file
        for step in bar:
            start = time.perf_counter()
            loss, norm = training_step(net, x, y, step, run.optimizers, options, run.autocast)
            run.step = step + 1
            last = run.step == options.max_iters
            due = last or run.step % options.eval_interval == 0
            if not last:
                x, y = fetch(run.train_split, options, run.step, run.device)    # while a GPU is at its optimizers
            if due and run.device.type == "cuda":
                torch.cuda.synchronize(run.device)                          # the step, not the evaluation, has that time
            run.seconds += time.perf_counter() - start                      # nothing below is counted

            val_loss = None
            if due:
                val_loss = evaluate(model, run.val_split, options, run.device, run.autocast)
                require_finite({"validation loss": val_loss}, step, options)    # or it would replace a good checkpoint
            if due or run.step % options.log_interval == 0:
                status = log_row(run, loss, norm, val_loss)
                bar.set_postfix_str(status, refresh=False)
            if saved := due or bool(stopped):
                save_checkpoints(run, val_loss, last=last or bool(stopped))     # behind the row: a kill loses no row
            if due:
                bar.write(f"step {run.step}: validation loss {val_loss:.4f}; training {status}")
            if stopped and saved and not last:                              # or it came just now: after the next step
                print(f"stopped after step {run.step}; resume with: {resume_command(run)}")
                raise SystemExit(128 + stopped[0])
    finish(run, val_loss)
    return val_loss


@contextmanager
def run_folder(run: Run):
    """The run's folder, locked against other runs, for a run to begin or to go on in it. Raises UserError."""
    out = run.out
    try:
        with only_writer(out):
            rows = log_rows(out / "log.csv", run.step)          # may refuse, so it comes before anything is touched
            if run.step == 0:
                require_free(out, run.options)                  # again: another run may have come and gone
                (out / "last.pt").unlink(missing_ok=True)       # which --overwrite allows: nothing may be resumed
                (out / "best.pt").unlink(missing_ok=True)       # that is not of the new log
            for name in ("last.pt", "best.pt", "log.csv"):
                (out / f"{name}.tmp").unlink(missing_ok=True)   # of a run that was killed while saving
            with replacing(out / "log.csv") as file:
                file.write("".join(f"{row}\n" for row in (LOG_COLUMNS, *rows)).encode())
            if run.step:
                heal_best(run)
            yield
    except OSError as error:
        raise UserError(f"--out_dir={out}: cannot write there ({error}), name another folder") from None


def finish(run: Run, val_loss: float) -> None:
    """What a run ends with: its loss, how much of each mix comes from the anchors, a sample."""
    print(f"{report(val_loss)}, best {run.best_loss:.4f}; {run.seconds:.0f} s of training")
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


def prompt_of(text: str) -> bytes:
    """A prompt's bytes: the text's, or of the file that it names with an @ before it."""
    if text.startswith("@") and not text.startswith("@@"):              # @@ is a prompt that begins with one @
        path = Path(text[1:]).expanduser()
        if not path.is_file():
            raise UserError(f"--sample={text}: no file {str(path)!r}; for a prompt that begins with @, write @@")
        return path.read_bytes()
    return text.removeprefix("@" if text.startswith("@@") else "").encode("utf-8", "surrogateescape")


def sample(options: Options, block_size: int | None = None) -> None:
    """Print the prompt `options.sample` and its continuation, token by token, by out_dir's best.pt."""
    device, path = pick_device(options.device), Path(options.out_dir).expanduser() / "best.pt"
    prompt = prompt_of(options.sample)
    checkpoint, model = load_checkpoint(path, block_size)
    if checkpoint["data"].get("tokenizer") != "bytes":
        raise UserError(f"{path} has the tokenizer {checkpoint['data'].get('tokenizer')}: --sample can only spell 'bytes', "
                        "for gpt2 see experiments/pretrained.py")
    if max(prompt, default=0) >= model.config.vocab_size:
        raise UserError(f"--sample: the prompt has the byte {max(prompt)}, {path} knows {model.config.vocab_size} ids: "
                        "leave it out")
    # A vocabulary wider than the tokenizer's, padded for speed perhaps: ids that no byte spells are not drawn
    model.W_head.weight = nn.Parameter(model.W_head.weight[:256])
    idx = torch.tensor([list(prompt or b"\n")], device=device)
    generator = torch.Generator(device).manual_seed(options.seed)
    stop = (options.stop or "").encode("utf-8", "surrogateescape")
    model.to(device).eval()
    for n in range(options.num_samples):
        if n > 0:
            print("-" * 20)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode        # a character may span several tokens
        print(prompt.decode("utf-8", "replace"), end="")
        text = b""
        for token in model.stream(idx, options.max_new_tokens, options.temperature, generator=generator):
            byte = bytes([token.item()])
            text = (text + byte)[-max(1, len(stop)):]                           # no longer than what it is compared with
            print(decode(byte), end="", flush=True)
            if stop and text.endswith(stop):
                break
        print()


def is_out_of_memory(error: Exception) -> bool:
    """torch has a class for a GPU's memory alone; the CPU's allocator says it in words."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def main(argv: list[str]) -> int:
    try:
        given = parse(argv)
        if "sample" in given:
            require_sense(given)
            block_size = given.pop("block_size", None)
            sample(checked(Options(**given)), block_size)
        else:
            train(given)
        return 0
    except BrokenPipeError:                                             # of a sample: `| head` has read enough
        return 0
    except (UserError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("train.py: not enough memory: lower --batch_size, with --gradient_accumulation_steps for the same step, or "
              "--block_size, --n_embd or --n_layer; a sample may be drawn with --device=cpu", file=sys.stderr)
        return 2


if __name__ == "__main__":
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)                       # no traceback where nothing is at stake
    # not the code page of a redirection; names of files as they are; line by line into a file too
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", line_buffering=True)
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        try:
            sys.stdout.flush()
        except OSError:                                                 # nobody reads: no complaint at the very end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
