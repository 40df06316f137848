"""
The paper's benchmarks: six multiple-choice tasks, five examples in each prompt, through EleutherAI's harness lm-eval.

    pip install "lm-eval>=0.4.13"                                   and tiktoken, for a model of GPT-2's tokens
    python experiments/evaluate.py out/best.pt                      all six; the harness downloads their data, once
    python experiments/evaluate.py out/best.pt --limit=100          a first look: 100 questions of each
    python experiments/evaluate.py out/best.pt --tasks=mine --include=FOLDER        a task of yours, a YAML in FOLDER

CKPT is a checkpoint of train.py, or what pretrained.py --save made of the authors' file. The harness writes the prompts
and counts the right answers: those whose log-likelihood after the prompt is the highest (acc), or the highest for each
of their characters (acc_norm). This file computes log-likelihoods; from the top down: tokens, windows, batches, harness.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from hashlib import sha1
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data.prepare import UserError, replacing  # noqa: E402
from exoformer import ExoFormer  # noqa: E402

TASKS = "arc_challenge,arc_easy,hellaswag,openbookqa,piqa,winogrande"
INSTALL = 'pip install "lm-eval>=0.4.13"'
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


# --- Tokens ----------------------------------------------------------------------------------------
def tokenizer(name: str | None) -> tuple[Callable[[str], list[int]], int, int]:
    """(encode, the id that stands before a text without context, how many ids there are). Raises UserError."""
    if name == "bytes":
        return lambda text: list(text.encode("utf-8", "replace")), ord("\n"), 256
    if name != "gpt2":
        raise UserError(f"the checkpoint's tokenizer is {name!r}: expected 'bytes' or 'gpt2', the tasks are texts")
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding("gpt2")
    except ImportError:
        raise UserError("no tiktoken, which this model's tokens need: pip install tiktoken") from None
    except (OSError, ValueError) as error:                          # no network; what came is not the file
        files = " and ".join(f"{GPT2}{file} as {sha1((GPT2 + file).encode()).hexdigest()}"
                             for file in ("vocab.bpe", "encoder.json"))
        raise UserError(f"no tokens of GPT-2 ({type(error).__name__}): fetch {files} by hand, into a folder that the "
                        "environment's TIKTOKEN_CACHE_DIR names") from None
    return gpt2.encode_ordinary, gpt2.eot_token, gpt2.n_vocab


def encode_pair(encode: Callable[[str], list[int]], prefix: int, context: str, continuation: str
                ) -> tuple[list[int], int]:
    """(ids of both texts together, where the continuation begins). The prefix stands in for an empty context.

    Tokens begin with a space, so spaces that end the context go over to the continuation. Where a token reaches across
    the boundary, the continuation begins with it: the context is what the ids of both and of the context alone share.
    """
    spaces = len(context) - len(context.rstrip())
    context, both = context[:len(context) - spaces], context + continuation
    ids = encode(both)
    start = len(os.path.commonprefix([ids, encode(context)]))
    return (ids, start) if start else ([prefix, *ids], 1)


# --- Windows and batches ---------------------------------------------------------------------------
def windows(ids: list[int], start: int, block_size: int) -> Iterator[tuple[list[int], int]]:
    """(window, n): the last n ids of a window are predicted from those before them, block_size at most.

    One window, cut on the left, for up to block_size ids from `start` on; a longer text takes several. Each id is
    predicted once, after as many others as fit.
    """
    for first in range(start, len(ids), block_size):
        end = min(first + block_size, len(ids))
        yield ids[max(0, end - block_size - 1):end], end - first


@torch.no_grad()
def log_likelihoods(model: ExoFormer, sequences: list[tuple[list[int], int]], batch_size: int, autocast
                    ) -> list[tuple[float, bool]]:
    """For each (ids, start): log p(ids[start:] | ids[:start]) in nats, and whether each of them was the likeliest id."""
    device = model.embed.weight.device
    todo = [(window, n, i) for i, (ids, start) in enumerate(sequences)
            for window, n in windows(ids, start, model.config.block_size)]
    todo.sort(key=lambda item: -len(item[0]))           # alike in length, little padding; a lack of memory shows at once
    found = [(0.0, True)] * len(sequences)
    with tqdm(total=len(todo), desc="answers", disable=None) as bar:
        for batch in (todo[k:k + batch_size] for k in range(0, len(todo), batch_size)):
            rows = [torch.tensor(window[:-1]) for window, _, _ in batch]
            idx = pad_sequence(rows, batch_first=True).to(device)           # [B, T]; causal: nothing sees the padding
            with autocast:
                logits: Tensor = model(idx)[0]                              # [B, T, V]
            for row, (window, n, i) in zip(logits, batch):
                row = row[len(window) - 1 - n:len(window) - 1]              # [n, V], what predicts the last n ids
                log_p = row.to(torch.promote_types(row.dtype, torch.float32)).log_softmax(-1)
                targets = torch.tensor(window[-n:], device=device)[:, None]     # [n, 1]
                greedy = bool((log_p.argmax(-1, keepdim=True) == targets).all())
                found[i] = found[i][0] + log_p.gather(-1, targets).sum().item(), found[i][1] and greedy
            bar.update(len(batch))
    return found


# --- The harness -----------------------------------------------------------------------------------
def require_harness() -> None:
    """Raises UserError where lm-eval is not installed. Makes it quiet."""
    # It imports Hugging Face's package `evaluate`, which this file would hide
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "experiments"]
    if not sys.stderr.isatty():
        os.environ |= dict(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(f"no lm-eval ({error}): {INSTALL}") from None


def load_tasks(names: list[str], fewshot: int, include: Path | None) -> list:
    """The harness's tasks, with their data. Raises UserError for one that is not there or cannot be run."""
    from lm_eval.tasks import TaskManager

    for defaults in (False, True) if include else (True,):      # its own are thousands: looked through only if need be
        manager = TaskManager(include_path=include, include_defaults=defaults)
        unknown = [name for name in names if name not in manager.all_subtasks]
        if not unknown:
            break
    else:
        near = get_close_matches(unknown[0], manager.all_subtasks, 3)
        raise UserError(f"--tasks={unknown[0]}: no task of the harness or of --include, did you mean "
                        f"{' or '.join(near) or TASKS}? (a group is given by the names of its tasks)")
    tasks = []
    for name in names:
        try:
            task, = manager.load([name])["tasks"].values()
        except Exception as error:                              # of a data set's library, of many kinds
            raise UserError(f"--tasks={name}: not loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
                            "its data needs the network once, or Hugging Face's cache; a YAML of yours, that it is "
                            "right") from None
        if task.OUTPUT_TYPE == "generate_until":
            raise UserError(f"--tasks={name}: its answers are generated, expected a task that compares likelihoods")
        pool = len(task.sampler.fewshot_docs())
        own = task.fewshot_cfg.split == task.config.test_split  # then a question is drawn too, and left out of its prompt
        if task.config.num_fewshot != 0 and 0 < fewshot and pool < fewshot + own:
            raise UserError(f"--fewshot={fewshot}: {name} has {pool} examples to draw from"
                            f"{', one of them the question itself' if own else ''}: give at most {max(0, pool - own)}")
        tasks.append(task)
    return tasks


def run(model: ExoFormer, encode: Callable[[str], list[int]], prefix: int, tasks: list, fewshot: int, limit: int | None,
        batch_size: int, autocast) -> dict[str, dict]:
    """{task: shots, examples, version, and each metric with its standard error}, as the harness counts."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    class Adapter(LM):
        def loglikelihood(self, requests):
            pairs = [encode_pair(encode, prefix, *request.args) for request in requests]
            return log_likelihoods(model, pairs, batch_size, autocast)

        def loglikelihood_rolling(self, requests):              # of a whole text, for perplexities
            texts = [([prefix, *encode(*request.args)], 1) for request in requests]
            return [nats for nats, _ in log_likelihoods(model, texts, batch_size, autocast)]

        def generate_until(self, requests):
            raise NotImplementedError                           # load_tasks refuses such tasks

    with patch("lm_eval.api.task.tqdm", partial(tqdm, desc="prompts", leave=False, disable=None)):
        found = simple_evaluate(Adapter(), tasks=tasks, num_fewshot=fewshot, limit=limit, log_samples=False)
    return {name: dict(shots=found["n-shot"][name], examples=found["n-samples"][name]["effective"],
                       version=found["versions"][name],
                       metrics={key.removesuffix(",none").replace("_stderr,none", " ±"): float(value)
                                for key, value in metrics.items() if isinstance(value, float)})
            for name, metrics in found["results"].items()}


# --- The table -------------------------------------------------------------------------------------
def accuracies(results: dict[str, dict]) -> list[float]:
    """One for each task that has any: acc_norm, or acc where the harness gives no other."""
    metrics = [of["metrics"] for of in results.values()]
    return [of.get("acc_norm", of.get("acc")) for of in metrics if "acc" in of or "acc_norm" in of]


def table(results: dict[str, dict]) -> str:
    """The results as Markdown."""
    names = dict.fromkeys(name for of in results.values() for name in of["metrics"] if not name.endswith(" ±"))
    rows = [f"| task | shots | examples | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for task, of in results.items():
        cells = []
        for name in names:
            value, error = of["metrics"].get(name), of["metrics"].get(f"{name} ±")
            cells.append("" if value is None else f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}")
        rows.append(f"| {task} | {of['shots']} | {of['examples']} | {' | '.join(cells)} |")
    found = accuracies(results)
    if found:
        rows.append(f"\naverage accuracy of {len(found)} tasks, acc_norm where a task has it, else acc: "
                    f"{sum(found) / len(found):.4f}")
    return "\n".join(rows)


def is_authors(path: Path) -> bool:
    """Whether it is a file of the authors' own training script, which names its sizes model_args."""
    try:
        return "model_args" in torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return False


def evaluate(args: argparse.Namespace) -> dict:
    """What --save keeps: the results and what they are of. Raises UserError."""
    for name, least in (("fewshot", 0), ("batch_size", 1), ("limit", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UserError(f"--{name}={value}: expected {least} or more")
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks={args.tasks}: expected names with commas between them, as {TASKS}")
    if args.include and not args.include.is_dir():
        raise UserError(f"--include={args.include}: no such folder, expected one with YAML files of tasks")
    if args.save and args.save.exists():
        raise UserError(f"--save={args.save} is there already: name another file, or move it away")
    if not args.checkpoint.is_file():
        raise UserError(f"{args.checkpoint} is no file: expected a checkpoint, best.pt in a run's --out_dir")
    require_harness()
    device = train.pick_device(args.device)
    dtype = train.pick_dtype(args.dtype, device)
    if is_authors(args.checkpoint):
        raise UserError(f"{args.checkpoint} is the authors' own: first python experiments/pretrained.py "
                        f"{args.checkpoint} --save=FILE, then give that FILE")
    checkpoint, model = train.load_checkpoint(args.checkpoint)
    encode, prefix, size = tokenizer(checkpoint["data"].get("tokenizer"))
    if size > model.config.vocab_size:
        raise UserError(f"{args.checkpoint} knows {model.config.vocab_size} ids, its tokenizer has {size}: train again")
    tasks = load_tasks(names, args.fewshot, args.include)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    results = run(model.to(device).eval(), encode, prefix, tasks, args.fewshot, args.limit, args.batch_size, autocast)
    return dict(checkpoint=str(args.checkpoint), step=checkpoint["step"], config=checkpoint["config"], dtype=dtype,
                limit=args.limit, lm_eval=importlib.metadata.version("lm_eval"), results=results)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("evaluate.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="best.pt of a run, or of pretrained.py --save")
    parser.add_argument("--tasks", default=TASKS, help=f"names with commas between them (default: {TASKS})")
    parser.add_argument("--fewshot", type=int, default=5, help="examples in each prompt (default: 5)")
    parser.add_argument("--limit", type=int, help="questions of each task, the first ones (default: all)")
    parser.add_argument("--batch_size", type=int, default=8, help="answers at a time (default: 8)")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="whose YAML files are tasks too")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: what train.py takes)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="put the results into this JSON file, a new one")
    args = parser.parse_args(argv)
    try:
        line = evaluate(args)
        try:
            if args.save:
                with replacing(args.save) as file:
                    file.write(json.dumps(line, indent=1).encode())
        finally:
            print(table(line["results"]))                           # also where the disk is full
        return 0
    except (UserError, OSError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not train.is_out_of_memory(error):
            raise
        print(f"evaluate.py: not enough memory: lower --batch_size={args.batch_size}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1:]))
