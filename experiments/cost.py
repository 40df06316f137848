"""
What anchors cost (the paper's Appendix D), for all seven systems in one interleaved run.

    python experiments/cost.py              a Markdown table; --quick only shows that it runs
    python experiments/cost.py --save       the same, and into experiments/results/cost.jsonl, for report.py
    python experiments/cost.py --threads=1 --size=small     what a run of ablations.py has

Parameters, FLOPs per token, bytes of the K/V cache; time of a training step (train.training_step), of prefill (the
whole context through an empty cache) and of a decoded token. Systems take turns within a round; times are medians, in
brackets the middle half of the ratios to `gated` within a round. Beside them stands what FLOPs alone predict, and the
speed of one large matrix product measured in the same rounds.
"""

import argparse
import json
import sys
from functools import partial
from statistics import median

import torch
from bench import TINY, autocast, caption, clock, models, ratio

import train
from ablations import RESULTS, read_lines
from data.prepare import replacing
from exoformer import VARIANTS, Config, ExoFormer

SIZES = {"small": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=16),
         "cpu": dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8),
         "large": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)}
DECODED = 16                                    # tokens a timing


def cache_bytes(config: Config, bytes_each: int) -> int:
    """Of one sequence of block_size positions: k and v of every layer. Anchors need none."""
    return 2 * config.n_layer * config.block_size * config.n_embd * bytes_each


def jobs_of(model: ExoFormer, size: dict, device: torch.device, dtype: str) -> dict:
    """{what: a function to time}."""
    T, context = size["block_size"], autocast(device, dtype)
    x, y = torch.randint(256, (2, size["batch_size"], T), device=device)
    options = train.Options(muon_lr=1e-3, adamw_lr=1e-3, batch_size=size["batch_size"])
    optimizers = train.make_optimizers(model, options, device)
    prompt, token = x[:1, :T - DECODED], x[:1, :1]

    def prefill():
        cache = model.new_cache()
        with torch.inference_mode(), context:
            model(prompt, cache=cache)
        return cache

    cache = prefill()

    def decode():
        for layer in cache:
            layer.length = T - DECODED          # the same positions again
        with torch.inference_mode(), context:
            for _ in range(DECODED):
                model(token, cache=cache)

    return dict(step=partial(train.training_step, model, x, y, 100, optimizers, options, context),
                prefill=prefill, token=decode)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("cost.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="cpu",
                        help="small, cpu (python train.py's) or large (default: cpu)")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    parser.add_argument("--rounds", type=int, help="of timing (default: 15)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda ...")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: what train.py takes)")
    parser.add_argument("--save", action="store_true", help="put the figures into experiments/results/cost.jsonl")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    args = parser.parse_args(argv)
    for name in ("threads", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: expected 1 or more")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        device = train.pick_device(args.device)
        dtype = train.pick_dtype(args.dtype, device)
    except train.UserError as error:
        print(f"cost.py: {error}", file=sys.stderr)
        return 2
    size = (TINY | dict(block_size=32)) if args.quick else SIZES[args.size]
    systems = models(device, size, VARIANTS)
    jobs = {(variant, what): job for variant, model in systems.items()
            for what, job in jobs_of(model, size, device, dtype).items()}
    side = 64 if args.quick else 2048
    a, b = torch.randn(2, side, side, device=device, dtype=getattr(torch, dtype))
    jobs["product"] = lambda: a @ b
    seconds = clock(jobs, args.rounds or (1 if args.quick else 15), device)

    peak = 2 * side**3 / median(seconds["product"])
    heading = caption(size, device, dtype)
    rows = []
    for variant, model in systems.items():
        per_token = model.flops_per_token()
        step_flops = per_token * size["batch_size"] * size["block_size"]
        times = {what: median(seconds[variant, what]) for what in ("step", "prefill", "token")}
        times["token"] /= DECODED
        rows.append(dict(
            variant=variant, parameters=model.num_params()[0], flops_per_token=per_token,
            cache=cache_bytes(model.config, 2 if dtype == "bfloat16" else 4),
            flops=round(per_token / systems["gated"].flops_per_token(), 3),
            of_peak=round(step_flops / times["step"] / peak, 3),
            **{what: round(1000 * time, 2) for what, time in times.items()},
            **{f"{what}_ratio": ratio(seconds[variant, what], seconds["gated", what]) for what in times}))
    line = dict(caption=heading.strip(), size=args.size, threads=torch.get_num_threads(), peak=round(peak / 1e9, 1),
                rows=rows)
    if args.save and not args.quick:
        path = RESULTS / "cost.jsonl"
        kept = [of for of in read_lines(path) if (of["size"], of["threads"]) != (line["size"], line["threads"])]
        with replacing(path) as file:
            file.write(b"".join(json.dumps(of).encode() + b"\n" for of in (*kept, line)))
    print(table(line))
    return 0


def table(line: dict) -> str:
    """The figures as Markdown."""
    text = [f"{line['caption']}. A large matrix product runs at {line['peak']:.0f} GFLOP/s.\n",
            "| | parameters | FLOPs a token | of gated's | K/V cache | a step | of gated's "
            "| of the product's speed | prefill, of gated's | a token, of gated's |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for row in line["rows"]:
        text.append(f"| `{row['variant']}` | {row['parameters']:,} | {row['flops_per_token'] / 1e6:.2f}M "
                    f"| {row['flops']:.3f} | {row['cache'] / 1024:.0f} KiB | {row['step']:.0f} ms "
                    f"| {row['step_ratio']} | {row['of_peak']:.0%} | {row['prefill_ratio']} | {row['token_ratio']} |")
    return "\n".join(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1:]))
