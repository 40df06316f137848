"""
What experiments/evaluate.py claims: python -m pytest -q experiments/tests/test_evaluate.py

The tests that take the argument `harness` need lm-eval (pip install lm-eval) and are skipped without it; no network.
"""

import copy
import importlib.util
import json
import subprocess
import sys
import types
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data.prepare import UserError  # noqa: E402
from exoformer import Config, ExoFormer  # noqa: E402

SCRIPT = ROOT / "experiments" / "evaluate.py"
_spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)      # `evaluate` is Hugging Face's package
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
torch.set_num_threads(1)

encode, NEWLINE, _ = script.tokenizer("bytes")


# --- Models whose answers are known ----------------------------------------------------------------
def random_model(variant="exoformer-dynamic", block_size=16):
    """Every parameter random: a fresh model's logits are all zero, so that any two of them would agree."""
    model = ExoFormer(Config.variant(variant, vocab_size=40, block_size=block_size, n_layer=3, n_head=2, n_embd=16))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator) + ("norm" in name or ".lam." in name))
    return model.eval()


def alphabet_model():
    """Knows the alphabet: a letter's successor has the logit √32, all else 0, whatever stands further back.

    Its layers change nothing (W_O and W_down are zero), a letter's embedding is a unit vector of its own, and the norm
    makes that √32 times as long.
    """
    model = ExoFormer(Config.variant("exoformer", vocab_size=256, block_size=64, n_layer=1, n_head=1, n_embd=32,
                                      norm_eps=0.0))
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.weight[:, 31] = 1                                   # all that is no letter
        for i, byte in enumerate(b"abcdefghijklmnopqrstuvwxyz"):
            model.embed.weight[byte] = torch.eye(32)[i]
            model.W_head.weight[ord("a") + (i + 1) % 26, i] = 1
    return model


KNOWN, OTHER = (np.log(np.exp(logit) / (np.exp(32**0.5) + 255)) for logit in (32**0.5, 0))


def by_hand(context, continuation):
    """What alphabet_model gives: the sum over the continuation's bytes."""
    total = 0.0
    for last, byte in zip((context + continuation)[len(context) - 1:], continuation):
        if last.islower():
            total += KNOWN if byte == chr(ord("a") + (ord(last) - ord("a") + 1) % 26) else OTHER
        else:
            total += np.log(1 / 256)
    return total


def checkpoint(path, model, tokenizer="bytes"):
    train.save(path, dict(format=train.FORMAT, step=3, seconds=0.0, val_loss=None, best_loss=0.0,
                          data=dict(tokenizer=tokenizer), config=asdict(model.config), options={},
                          model=model.state_dict(), optimizer_state={}))
    return path


# --- Log-likelihoods -------------------------------------------------------------------------------
def oracle(model, ids, start):
    """What log_likelihoods says of a sequence, in float64: id by id, no batch, no padding, NumPy's log-softmax."""
    model = copy.deepcopy(model).double()
    T, total, greedy = model.config.block_size, 0.0, True
    for at in range(start, len(ids)):
        end = min(start + ((at - start) // T + 1) * T, len(ids))        # of the window that predicts this id
        first = max(0, end - 1 - T)
        with torch.no_grad():
            logits = model(torch.tensor([ids[first:at]]))[0][0, -1].numpy()
        total += logits[ids[at]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        greedy &= logits.argmax() == ids[at]
    return total, greedy


def sequences(count=12, longest=60):
    random = np.random.default_rng(5)
    for length in random.integers(2, longest, count):
        yield random.integers(0, 40, length).tolist(), int(random.integers(1, length))


@pytest.mark.parametrize("variant", ["exoformer-dynamic", "nuresformer", "base"])
def test_batched_equals_one_by_one_and_float64(variant):
    """In batches of any size, in any order, cut and padded: the same to 1e-5; most are longer than the context."""
    model, todo = random_model(variant), list(sequences())
    assert sum(len(ids) > 17 for ids, _ in todo) > 5 and sum(len(ids) - start > 16 for ids, start in todo) > 2
    one_by_one = [script.log_likelihoods(model, [each], 1, nullcontext())[0] for each in todo]
    for batch_size in (3, 7, 100):
        found = script.log_likelihoods(model, todo, batch_size, nullcontext())
        np.testing.assert_allclose([nats for nats, _ in found], [nats for nats, _ in one_by_one], rtol=1e-5, atol=1e-5)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in one_by_one]
    exact = [oracle(model, *each) for each in todo]
    np.testing.assert_allclose([nats for nats, _ in one_by_one], [nats for nats, _ in exact], rtol=1e-5, atol=1e-5)
    assert [greedy for _, greedy in one_by_one] == [greedy for _, greedy in exact]


def test_greedy_is_what_the_model_would_write():
    """True of the model's own greedy continuation, in a batch with others; False once any one of its ids is another."""
    model = random_model(block_size=32)
    ids = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), 6, temperature=0)[0].tolist()
    others = [[*ids[:at], (ids[at] + 1) % 40, *ids[at + 1:]] for at in range(5, 11)]
    found = script.log_likelihoods(model, [(each, 5) for each in (ids, *others, ids[:9])], 4, nullcontext())
    assert [greedy for _, greedy in found] == [True] + 6 * [False] + [True]
    text, wrong = (encode(4 * "abcdefghijklmnopqrstuvwxyz".replace("j", j, 1)) for j in "jx")      # of two windows
    texts = [(text, 1), (wrong[:26] + text[26:], 1), (text[:78] + wrong[78:], 1)]
    found = script.log_likelihoods(alphabet_model(), texts, 4, nullcontext())
    assert [greedy for _, greedy in found] == [True, False, False]


def test_nothing_to_predict_is_certain():
    assert script.log_likelihoods(random_model(), [([1, 2], 2)], 4, nullcontext()) == [(0.0, True)]


def test_the_longest_go_first_with_little_padding():
    """The first batch is the largest, so a lack of memory shows at once; a batch has sequences of like length."""
    model, shapes = random_model(), []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    script.log_likelihoods(model, [(list(range(1 + n)), 1) for n in (2, 9, 3, 16, 2, 10, 4, 15)], 2, nullcontext())
    assert shapes == [(2, 16), (2, 10), (2, 4), (2, 2)]


def test_windows_predict_each_id_once():
    """At most block_size + 1 ids, the continuation at the end; a long text side by side, the last with full context."""
    assert list(script.windows([9, 8, 7, 6, 5, 4], 4, 3)) == [([7, 6, 5, 4], 2)]
    assert list(script.windows([9, 8, 7], 2, 3)) == [([9, 8, 7], 1)]
    whole = [-1, *range(10)]                                            # as the harness's own documentation has it
    assert list(script.windows(whole, 1, 4)) == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]


# --- Tokens ----------------------------------------------------------------------------------------
PIECES = ["a", "b", "c", " ", "ab", " c", " ab", "  "]


def encode_pieces(text):
    """A toy of GPT-2's kind: always the longest piece that fits, some begin with a space."""
    ids = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        ids, text = [*ids, PIECES.index(piece)], text[len(piece):]
    return ids


def test_pairs_split_where_both_together_split():
    def split(context, continuation):
        ids, start = script.encode_pair(encode_pieces, 99, context, continuation)
        spell = [PIECES[i] if i != 99 else "?" for i in ids]
        return spell[:start], spell[start:]

    assert split("ab", " c") == (["ab"], [" c"])
    assert split("ab ", "c") == (["ab"], [" c"])                        # the space goes over: " c" is one token
    assert split("c ", " c") == (["c"], ["  ", "c"])                    # as both together are read, not each alone
    assert split("ca", "b") == (["c"], ["ab"])                          # no token is lost between the two
    assert split("", "ab c") == (["?"], ["ab", " c"])                   # something must stand before the first id
    assert split("  ", "c") == (["?"], ["  ", "c"])
    assert split("a", "b") == (["?"], ["ab"])
    assert script.encode_pair(encode, NEWLINE, "né", "é") == (list("néé".encode()), 3)


class Tiktoken(types.ModuleType):
    """In tiktoken's place, with a table or without network."""
    def __init__(self, error=None):
        super().__init__("tiktoken")
        self.error = error

    def get_encoding(self, name):
        if self.error:
            raise self.error
        return types.SimpleNamespace(encode_ordinary=encode_pieces, eot_token=50256, n_vocab=50257, name=name)


def test_tokenizers(monkeypatch):
    """bytes, or GPT-2's by tiktoken with end-of-text before an empty context; what is missing is said in one line."""
    assert script.tokenizer("bytes")[0]("né\n") == list("né\n".encode()) and script.tokenizer("bytes")[1:] == (10, 256)
    assert script.tokenizer("bytes")[0]("\ud800") == [ord("?")]
    monkeypatch.setitem(sys.modules, "tiktoken", Tiktoken())
    assert script.tokenizer("gpt2") == (encode_pieces, 50256, 50257)
    unreachable = Tiktoken(ConnectionError("no\nway"))
    for module, words in ((None, ["pip install tiktoken"]),
                          (unreachable, ["no way", "vocab.bpe as 6d1cbeee", "encoder.json as 6c7ea1a7"])):
        monkeypatch.setitem(sys.modules, "tiktoken", module)
        with pytest.raises(UserError) as error:
            script.tokenizer("gpt2")
        assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(UserError, match="None: expected 'bytes' or 'gpt2'"):
        script.tokenizer(None)


# --- The command -----------------------------------------------------------------------------------
def refused(capsys, *argv):
    """The one line of main's refusal."""
    assert script.main([str(arg) for arg in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("evaluate.py: ") and err.count("\n") == 1, err
    return err


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "require_harness", lambda: None)
    good = checkpoint(tmp_path / "best.pt", alphabet_model())
    (tmp_path / "old.json").write_text("{}")
    for flag, says in {"--fewshot=-1": "expected 0 or more", "--batch_size=0": "expected 1 or more",
                       "--limit=0": "expected 1 or more", "--device=tpu": "cpu", "--dtype=float16": "float32",
                       f"--include={tmp_path / 'nothing'}": "no folder",
                       f"--save={tmp_path / 'old.json'}": "is there already"}.items():
        err = refused(capsys, good, flag)
        assert flag in err and says in err, err
    assert (tmp_path / "old.json").read_text() == "{}"
    assert "best.pt in a run's" in refused(capsys, tmp_path / "nothing.pt") and "no file" in refused(capsys, tmp_path)
    torch.save(dict(model={}, model_args=dict(n_layer=2)), tmp_path / "theirs.pt")
    err = refused(capsys, tmp_path / "theirs.pt")
    assert f"pretrained.py {tmp_path / 'theirs.pt'} --save=FILE" in err, err
    assert "'words'" in refused(capsys, checkpoint(tmp_path / "words.pt", alphabet_model(), "words"))
    monkeypatch.setitem(sys.modules, "tiktoken", Tiktoken())
    err = refused(capsys, checkpoint(tmp_path / "small.pt", alphabet_model(), "gpt2"))
    assert "vocab_size=256" in err and "50257" in err, err


def test_without_the_harness_one_line_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "lm_eval", None)                   # as if it were not installed
    assert 'pip install "lm-eval' in refused(capsys, checkpoint(tmp_path / "best.pt", alphabet_model()))


def test_help_shows_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0 and "python experiments/evaluate.py out/best.pt" in capsys.readouterr().out


def test_lack_of_memory_is_one_line(tmp_path, capsys, monkeypatch):
    def evaluate(args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    monkeypatch.setattr(script, "evaluate", evaluate)
    assert "--batch_size=8" in refused(capsys, tmp_path)


RESULTS = {"a": dict(shots=5, examples=4, metrics={"acc": 0.5, "acc_stderr": 0.25, "acc_norm": 0.75}),
           "b": dict(shots=0, examples=9, metrics={"acc": 0.25}),
           "c": dict(shots=5, examples=2, metrics={"bits_per_byte": 2.0})}


def test_table_and_average():
    """Each metric with its standard error; the average takes acc_norm before acc, and tasks that have one."""
    assert script.table(RESULTS).splitlines() == [
        "| task | shots | examples | acc | acc_norm | bits_per_byte |", "|---|---|---|---|---|---|",
        "| a | 5 | 4 | 0.5000 ± 0.2500 | 0.7500 |  |", "| b | 0 | 9 | 0.2500 |  |  |", "| c | 5 | 2 |  |  | 2.0000 |",
        "", "average accuracy, acc_norm where a task has it and else acc: 0.5000"]
    assert "average" not in script.table({"c": RESULTS["c"]})


def test_results_are_printed_though_the_disk_is_full(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda args: dict(results=RESULTS))
    assert script.main(["best.pt", f"--save={tmp_path / 'no' / 'folder.json'}"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("| task |") and err.count("\n") == 1
    assert script.main(["best.pt", f"--save={tmp_path / 'new.json'}"]) == 0
    assert json.loads((tmp_path / "new.json").read_text()) == dict(results=RESULTS)


# --- With the harness, on tasks of our own ---------------------------------------------------------
@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """lm-eval without network, its caches below the tests' folder, and sys.path as it was afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        patch.setattr(sys, "path", list(sys.path))
        yield pytest.importorskip("lm_eval", reason="the harness is not here: pip install lm-eval")


QUESTIONS = [dict(start="abc", choices=["def", "dfe"], answer=0),               # right by acc and by acc_norm
             dict(start="xyz", choices=["acb", "abc"], answer=1),
             dict(start="klm", choices=["nop", "noq"], answer=1),               # its answer is none of the alphabet's
             dict(start="pqr", choices=["stuvwxyz", "st"], answer=0)]           # unlikelier as a whole, not by letter
EXAMPLES = [dict(start=letters, choices=[letters, "x"], answer=0) for letters in ("fg", "gh", "hi", "ij", "jk", "lm")]


def task(folder, name="alphabet", questions=QUESTIONS, examples=EXAMPLES, **changes):
    """A task's folder: name.yaml and its data. A YAML file may be JSON."""
    folder.mkdir(exist_ok=True)
    files = {}
    for split, rows in (("train", examples), ("test", questions)):
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = dict(task=name, dataset_path="json", dataset_kwargs=dict(data_files=files), output_type="multiple_choice",
                  training_split="train", test_split="test", fewshot_split="train", doc_to_text="{{start}}",
                  doc_to_choice="choices", doc_to_target="answer", target_delimiter="",
                  metric_list=[dict(metric=metric, aggregation="mean", higher_is_better=True)
                               for metric in ("acc", "acc_norm")])
    (folder / f"{name}.yaml").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_model_that_knows_the_alphabet(harness, tmp_path, capsys, monkeypatch, batch_size):
    """Through the command: accuracies and log-likelihoods are those worked out by hand, behind five examples each."""
    seen, compute = [], script.log_likelihoods

    def spy(model, pairs, *others):
        found = compute(model, pairs, *others)
        for (ids, start), of in zip(pairs, found):
            seen.append((bytes(ids[:start]).decode(), bytes(ids[start:]).decode(), of))
        return found
    monkeypatch.setattr(script, "log_likelihoods", spy)
    save = tmp_path / "results.json"
    best = checkpoint(tmp_path / "best.pt", alphabet_model())
    argv = [str(best), f"--include={task(tmp_path / 'tasks')}", "--tasks=alphabet", f"--batch_size={batch_size}",
            "--device=cpu", "--dtype=float32", f"--save={save}"]
    assert script.main(argv) == 0
    out = capsys.readouterr().out
    assert "| alphabet | 5 | 4 | 0.5000 ± 0.2887 | 0.7500 ± 0.2500 |" in out and out.endswith("acc: 0.7500\n"), out
    line = json.loads(save.read_text())
    assert line["results"]["alphabet"]["metrics"]["acc_norm"] == 0.75 and line["step"] == 3

    assert [answer for _, answer, _ in seen] == [choice for of in QUESTIONS for choice in of["choices"]]
    for prompt, answer, (nats, greedy) in seen:
        *shown, start = prompt.split("\n\n")
        assert len(set(shown)) == 5 and set(shown) < {2 * of["start"] for of in EXAMPLES}
        assert nats == pytest.approx(by_hand(start, answer), abs=1e-5)
        assert greedy == (answer in ("def", "abc", "nop", "stuvwxyz", "st")), answer
    assert str(save) in refused(capsys, *argv)                          # a second time it would be overwritten


def test_perplexity_of_whole_texts(harness, tmp_path, capsys):
    """Texts longer than the context, each byte predicted once, the first behind a newline: bits per byte by hand."""
    texts = [dict(text="abcdefghijklmnopqrstuvwxyz" * 4), dict(text="hello")]
    metric = dict(metric="bits_per_byte", aggregation="bits_per_byte", higher_is_better=False)
    folder = task(tmp_path / "tasks", "texts", texts, texts, output_type="loglikelihood_rolling", doc_to_text="",
                  doc_to_choice=None, doc_to_target="{{text}}", metric_list=[metric])
    best = checkpoint(tmp_path / "best.pt", alphabet_model())
    assert script.main([str(best), f"--include={folder}", "--tasks=texts", "--fewshot=0", "--dtype=float32"]) == 0
    nats = sum(by_hand("\n", text["text"]) for text in texts)
    assert f"| {-nats / np.log(2) / 109:.4f} |" in capsys.readouterr().out


def test_tasks_that_cannot_be_run_are_one_line(harness, tmp_path, capsys):
    best, folder = checkpoint(tmp_path / "best.pt", alphabet_model()), task(tmp_path / "tasks")
    task(folder, "itself", fewshot_split="test")
    task(folder, "writes", output_type="generate_until")
    task(folder, "far", dataset_path="nobody/nothing", dataset_kwargs=None)
    task(folder, "broken", doc_to_target="{{answer", num_fewshot=0)
    for flags, words in {
            "--tasks=alphabte": ["single tasks of", "did you mean alphabet?"],
            "--tasks=alphabet --fewshot=7": ["has 6 examples: expected at most 6"],
            "--tasks=itself --fewshot=4": ["has 4 examples, one of them left out: expected at most 3"],
            "--tasks=writes --fewshot=0": ["expected a task of log-likelihoods"],
            "--tasks=far": ["did not load", "nobody/nothing", "network"],
            "--tasks=broken": ["did not load", "YAML"]}.items():
        err = refused(capsys, best, f"--include={folder}", *flags.split())
        assert all(word in err for word in words), err
    for flags, row in (("--tasks=alphabet --fewshot=6 --limit=3", "| alphabet | 6 | 3 | "),     # the most there are
                       ("--tasks=itself --fewshot=3", "| itself | 3 | 4 | ")):
        assert script.main([str(best), f"--include={folder}", *flags.split()]) == 0
        assert row in capsys.readouterr().out


def test_pairs_and_windows_are_the_harness_s_own(harness):
    """Where its splitting loses no token, ours is the same; the windows of whole texts are its own, too."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    theirs = types.SimpleNamespace(backend="causal", tok_encode=encode_pieces)
    for context, continuation in (("ab", " c"), ("ab  ", "c"), ("c ab c", " ab"), ("b", "c")):
        both = TemplateLM._encode_pair(theirs, context, continuation)
        ids, start = script.encode_pair(encode_pieces, 99, context, continuation)
        assert (ids[:start], ids[start:]) == both
    for length in range(1, 14):
        pairs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(list(range(length)), -1, 4, 1)]
        ours = list(script.windows([-1, *range(length)], 1, 4))
        assert [window[-n:] for window, n in ours] == [after for _, after in pairs]
        assert [window[:-n] for window, n in ours] == [before for before, _ in pairs]


def test_the_harness_finds_hugging_face_s_evaluate(harness, tmp_path):
    """Run as a file, this script's folder is first on the path, and its name is that of a package the harness uses."""
    folder = task(tmp_path / "tasks", doc_to_text="!!", num_fewshot=0)
    text = (folder / "alphabet.yaml").read_text().replace('"!!"', "!function spell.start")
    (folder / "alphabet.yaml").write_text(text)
    (folder / "spell.py").write_text("from evaluate import load\n\ndef start(doc):\n    return doc['start']\n")
    best = checkpoint(tmp_path / "best.pt", alphabet_model())
    command = [sys.executable, SCRIPT, best, f"--include={folder}", "--tasks=alphabet", "--device=cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, encoding="utf-8")
    assert ran.returncode == 0 and "| alphabet | 0 | 4 | 0.5000" in ran.stdout and ran.stderr == "", ran.stderr
