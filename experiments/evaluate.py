"""
The paper's benchmarks: six multiple-choice tasks, five examples in each prompt, by EleutherAI's harness, lm-eval.

    pip install "lm-eval>=0.4.13"                               and tiktoken, for a model of GPT-2's tokens
    python experiments/evaluate.py out/best.pt                  all six; the harness downloads their data, once
    python experiments/evaluate.py out/best.pt --limit=100      a first look: the first 100 questions of each
    python experiments/evaluate.py out/best.pt --tasks=mine --include=FOLDER    a task of yours, a YAML file in FOLDER

CKPT is a checkpoint of train.py, or what pretrained.py --save made of the authors' file. The harness writes prompts and
counts right answers: the right choice is the one whose log-likelihood after the prompt is highest (acc), or highest per
character (acc_norm). The log-likelihoods are computed here: tokens -> windows -> batches.
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
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data.prepare import UserError, replacing  # noqa: E402
from exoformer import ExoFormer  # noqa: E402

TASKS = "arc_challenge,arc_easy,hellaswag,openbookqa,piqa,winogrande"
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
Encode = Callable[[str], list[int]]


# --- Tokens ----------------------------------------------------------------------------------------
def tokenizer(name: str | None) -> tuple[Encode, int, int]:
    """(encode, the id that stands for an empty context, how many ids there are). Raises UserError."""
    if name == "bytes":
        return lambda text: list(text.encode("utf-8", "replace")), ord("\n"), 256
    if name != "gpt2":
        raise UserError(f"the checkpoint's tokenizer is {name!r}: expected 'bytes' or 'gpt2', as the tasks are texts")
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding("gpt2")
    except (ImportError, OSError, ValueError) as error:             # not installed, no network, not the right file
        files = " and ".join(f"{url} as {sha1(url.encode()).hexdigest()}"
                             for url in (f"{GPT2}vocab.bpe", f"{GPT2}encoder.json"))
        raise UserError(f"no tokens of GPT-2 ({' '.join(str(error).split())[:80]}): pip install tiktoken; without "
                        f"network put {files} into a folder, and the folder into TIKTOKEN_CACHE_DIR") from None
    return gpt2.encode_ordinary, gpt2.eot_token, gpt2.n_vocab       # ordinary: a text cannot spell end-of-text


def encode_pair(encode: Encode, prefix: int, context: str, continuation: str) -> tuple[list[int], int]:
    """(ids of both texts together, where the continuation begins). The id `prefix` stands for an empty context.

    GPT-2's tokens begin with a space, so the spaces that end a context go over to the continuation. A token that
    reaches across the boundary is the continuation's: the context has the ids that it shares with both together.
    """
    own = encode(context.rstrip())
    ids = encode(context + continuation)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, ids)))
    return (ids, start) if start else ([prefix, *ids], 1)


# --- Windows and batches ---------------------------------------------------------------------------
def windows(ids: list[int], start: int, block_size: int) -> Iterator[tuple[list[int], int]]:
    """(window, n): the last n ids of a window are predicted. Over all windows those are ids[start:], each once.

    There is one window, cut on the left so that block_size ids go into the model. Only a continuation longer than that
    takes several: its first block_size ids, then the next, and the rest, behind as many before it as fit.
    """
    for first in range(start, len(ids), block_size):
        end = min(first + block_size, len(ids))
        yield ids[max(0, end - block_size - 1):end], end - first


@torch.no_grad()
def log_likelihoods(model: ExoFormer, sequences: list[tuple[list[int], int]], batch_size: int, autocast
                    ) -> list[tuple[float, bool]]:
    """Of each (ids, start): log p(ids[start:] | ids[:start]) in nats, and whether each id of them was the likeliest."""
    device = model.embed.weight.device
    todo = [(window, n, i) for i, (ids, start) in enumerate(sequences)
            for window, n in windows(ids, start, model.config.block_size)]
    todo.sort(key=lambda item: -len(item[0]))           # little padding, and a lack of memory shows at once
    found = [(0.0, True)] * len(sequences)
    for k in tqdm(range(0, len(todo), batch_size), desc="batches", disable=None):
        batch = todo[k:k + batch_size]
        # Padded on the right, where a causal model does not look
        idx = pad_sequence([torch.tensor(window[:-1]) for window, _, _ in batch], batch_first=True)     # [B, T]
        with autocast:
            logits = model(idx.to(device))[0]                           # [B, T, V]
        for row, (window, n, i) in zip(logits, batch):
            row = row[:len(window) - 1][-n:]                            # [n, V], without the padding
            log_p = row.to(torch.promote_types(row.dtype, torch.float32)).log_softmax(-1)
            ids = torch.tensor(window[-n:], device=device)              # [n]
            nats = log_p.gather(-1, ids[:, None]).sum().item()
            found[i] = found[i][0] + nats, found[i][1] and bool((log_p.argmax(-1) == ids).all())
    return found


# --- The harness -----------------------------------------------------------------------------------
def require_harness() -> None:
    """Raises UserError where lm-eval is not installed. Makes it quiet."""
    # Its `import evaluate` means Hugging Face's package, which this file would hide
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "experiments"]
    if not sys.stderr.isatty():
        os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(f'no lm-eval ({error}): pip install "lm-eval>=0.4.13"') from None


def load_tasks(names: list[str], fewshot: int, include: Path | None) -> dict:
    """{name: the harness's task, its data at hand}. Raises UserError for one that is not there or cannot be run."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include, include_defaults=include is None)       # its own take a while
    tasks = {}
    for name in names:
        if name not in manager.all_subtasks:
            near = " or ".join(get_close_matches(name, manager.all_subtasks))
            raise UserError(f"--tasks={name}: expected single tasks of {include or 'the harness'}"
                            f"{near and f', did you mean {near}?'}")
        try:
            task = tasks[name] = manager.load(name)["tasks"][name]
        except Exception as error:                              # of the libraries below it, of many kinds
            raise UserError(f"--tasks={name} did not load ({' '.join(str(error).split())[:200]}): its data needs the "
                            "network, or Hugging Face's cache; a task of yours, a YAML file without mistakes") from None
        if task.OUTPUT_TYPE == "generate_until":
            raise UserError(f"--tasks={name} has the model write: expected a task of log-likelihoods")
        if task.config.num_fewshot != 0:                        # where a task itself says 0, the harness leaves it so
            task.set_config("num_fewshot", fewshot)
        pool = len(task.sampler.fewshot_docs())
        own = task.fewshot_cfg.split == task.config.test_split  # it draws one more then, to leave out the one asked
        if task.config.num_fewshot > max(0, pool - own):
            raise UserError(f"--fewshot={fewshot}: {name} has {pool} examples{', one of them left out' if own else ''}"
                            f": expected at most {max(0, pool - own)}")
        task.set_fewshot_seed(1234)                             # the harness's own
    return tasks


def run(tasks: dict, limit: int | None, encode: Encode, prefix: int, model: ExoFormer, batch_size: int, autocast
        ) -> dict[str, dict]:
    """{task: version, shots, examples, metrics: each and its standard error, by name}, as the harness counts."""
    from lm_eval import evaluator
    from lm_eval.api.model import LM

    class Adapter(LM):
        def loglikelihood(self, requests):
            pairs = [encode_pair(encode, prefix, *request.args) for request in requests]
            return log_likelihoods(model, pairs, batch_size, autocast)

        def loglikelihood_rolling(self, requests):              # of whole texts, for perplexities
            texts = [([prefix, *encode(*request.args)], 1) for request in requests]
            return [nats for nats, _ in log_likelihoods(model, texts, batch_size, autocast)]

        def generate_until(self, requests):
            raise NotImplementedError                           # load_tasks refuses these

    with patch("lm_eval.api.task.tqdm", partial(tqdm, desc="prompts", leave=False, disable=None)):
        found = evaluator.evaluate(Adapter(), dict(tasks=tasks), limit=limit, log_samples=False)
    return {name: dict(version=found["versions"][name], shots=found["n-shot"][name], examples=of["sample_len"],
                       metrics={key.removesuffix(",none"): float(value)
                                for key, value in of.items() if "," in key and value != "N/A"})
            for name, of in found["results"].items()}


def table(results: dict[str, dict]) -> str:
    """The results as Markdown, and their average: of acc_norm, or of acc where a task has no other."""
    metrics = {task: of["metrics"] for task, of in results.items()}
    columns = list(dict.fromkeys(key for of in metrics.values() for key in of if "_stderr" not in key))
    rows = [f"| task | shots | examples | {' | '.join(columns)} |", "|---|---|---|" + "---|" * len(columns)]
    for task, of in metrics.items():
        cells = [" ± ".join(f"{of[x]:.4f}" for x in (key, f"{key}_stderr") if x in of) for key in columns]
        rows.append(f"| {task} | {results[task]['shots']} | {results[task]['examples']} | {' | '.join(cells)} |")
    found = [of.get("acc_norm", of["acc"]) for of in metrics.values() if "acc" in of]
    if found:
        rows.append(f"\naverage accuracy, acc_norm where a task has it and else acc: {sum(found) / len(found):.4f}")
    return "\n".join(rows)


def evaluate(args: argparse.Namespace) -> dict:
    """The results and what they are of. Raises UserError."""
    for name, least in (("fewshot", 0), ("batch_size", 1), ("limit", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UserError(f"--{name}={value}: expected {least} or more")
    if args.include and not args.include.is_dir():
        raise UserError(f"--include={args.include} is no folder: expected one with the YAML files of tasks")
    if args.save and args.save.exists():
        raise UserError(f"--save={args.save} is there already: name another file, or move it away")
    if not args.checkpoint.is_file():
        raise UserError(f"{args.checkpoint} is no file: expected a checkpoint, best.pt in a run's --out_dir")
    device = train.pick_device(args.device)
    dtype = train.pick_dtype(args.dtype, device)
    require_harness()
    try:
        checkpoint, model = train.load_checkpoint(args.checkpoint)
    except UserError as error:
        raise UserError(f"{error}; if it is the authors' own file, first: python experiments/pretrained.py "
                        f"{args.checkpoint} --save=FILE") from None
    encode, prefix, ids = tokenizer(checkpoint["data"].get("tokenizer"))
    if ids > model.config.vocab_size:
        raise UserError(f"{args.checkpoint} has vocab_size={model.config.vocab_size}: its tokenizer needs {ids}")
    tasks = load_tasks(list(dict.fromkeys(args.tasks.split(","))), args.fewshot, args.include)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    results = run(tasks, args.limit, encode, prefix, model.to(device).eval(), args.batch_size, autocast)
    return dict(checkpoint=str(args.checkpoint), step=checkpoint["step"], config=checkpoint["config"], dtype=dtype,
                limit=args.limit, lm_eval=importlib.metadata.version("lm_eval"), results=results)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("evaluate.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="of train.py or of pretrained.py --save")
    parser.add_argument("--tasks", default=TASKS, help=f"names with commas between them (default: {TASKS})")
    parser.add_argument("--fewshot", type=int, default=5, help="examples in each prompt (default: 5)")
    parser.add_argument("--limit", type=int, help="questions of each task, the first ones (default: all)")
    parser.add_argument("--batch_size", type=int, default=8, help="choices at a time (default: 8)")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="of tasks, YAML files, instead of the harness's")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: what train.py takes)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="put the results into a new JSON file")
    args = parser.parse_args(argv)
    try:
        line = evaluate(args)
        try:
            if args.save:
                with replacing(args.save) as file:
                    file.write(json.dumps(line, indent=1).encode())
        finally:
            print(table(line["results"]))                       # on a full disk, too
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
