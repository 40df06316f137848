"""
The paper's scale: its data, its sizes, its loss. python -m pytest -q experiments/tests/test_scale.py (a few seconds)

The shards come from a server on this machine, 1 000 tokens each instead of 100M.
"""

import http.server
import io
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data import prepare  # noqa: E402
from exoformer import VARIANTS, Config, ExoFormer  # noqa: E402

torch.set_num_threads(1)
TOKENS = 1000


def shard(name: str, tokens: int = TOKENS) -> bytes:
    """A file as llm.c writes it; its ids tell shards apart."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    first = int(re.search(r"\d+", name)[0]) * TOKENS
    return header.tobytes() + (np.arange(first, first + tokens) % 50257).astype("<u2").tobytes()


class Server(http.server.ThreadingHTTPServer):
    """Serves shards. `replies` holds, by name, what its next answers are instead: a status, or (bytes, length said)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.replies, self.pause = [], {}, 0.0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        reply = self.server.replies.get(name) or [(shard(name), None)]
        reply = reply.pop(0)
        if isinstance(reply, int):
            return self.send_error(reply)
        body, said = reply
        self.send_response(200)
        self.send_header("Content-Length", str(said or len(body)))
        self.end_headers()
        try:
            self.wfile.write(body[:1500])
            self.wfile.flush()
            time.sleep(self.server.pause)
            self.wfile.write(body[1500:])
        except OSError:                                 # the reader was killed
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(prepare, "FINEWEB_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(prepare, "SHARD", TOKENS)
        yield server
        server.shutdown()


def fetch(tmp_path, shards):
    return prepare.prepare("fineweb-edu", tmp_path, shards)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- Shards ----------------------------------------------------------------------------------------
def test_shards_come_once(server, tmp_path):
    """N training shards and the one of validation are fetched; more of them add only what is missing, fewer delete
    nothing; the validation split is the same whatever N."""
    folder = tmp_path / "fineweb-edu"
    meta = fetch(tmp_path, 2)
    assert meta["tokens"] == dict(train=2 * TOKENS, val=TOKENS) and meta["tokenizer"] == "gpt2"
    assert server.asked == ["finewebedu_val_000000.bin", "finewebedu_train_000001.bin", "finewebedu_train_000002.bin"]
    assert names(folder) == sorted(server.asked + ["meta.json"])
    assert fetch(tmp_path, 3)["tokens"]["train"] == 3 * TOKENS and server.asked[3:] == ["finewebedu_train_000003.bin"]
    less = fetch(tmp_path, 1)
    assert less["tokens"] == dict(train=TOKENS, val=TOKENS) and len(server.asked) == 4
    assert len(names(folder)) == 5 and less["ends"]["val"] == meta["ends"]["val"] != less["ends"]["train"]


@pytest.mark.parametrize("reply", [
    (shard("1")[:2000], None), (shard("1")[:2000], 3024), (shard("1", 900), None), (shard("1")[1024:], None),
    (b"<html>busy</html>", None), 404, 503], ids=["cut", "cut off", "too few", "no header", "a page", "404", "503"])
def test_a_broken_shard_is_fetched_again(server, tmp_path, reply):
    """What is not a whole shard never gets its name: it is fetched again, three times in all, and then named."""
    name = "finewebedu_train_000001.bin"
    server.replies = {name: [reply, reply]}
    assert fetch(tmp_path, 1)["tokens"]["train"] == TOKENS and server.asked.count(name) == 3
    (tmp_path / "fineweb-edu" / name).write_bytes(shard("1")[:2000])            # and so is one that was broken here
    fetch(tmp_path, 1)
    assert server.asked.count(name) == 4 and (tmp_path / "fineweb-edu" / name).read_bytes() == shard("1")

    name = "finewebedu_train_000002.bin"
    server.replies = {name: [reply] * 3}
    with pytest.raises(prepare.UserError, match=f"no download of http.*{name}.*run this again, or fetch it by hand"):
        fetch(tmp_path, 2)
    assert name not in "".join(names(tmp_path / "fineweb-edu"))
    assert prepare.load("fineweb-edu", 8, folder=tmp_path)[0]["vocab_size"] == 50304            # what was there still is


def test_a_shard_by_hand_is_taken(server, tmp_path):
    """Without a network: files that were put there are taken, where they are whole."""
    folder = tmp_path / "fineweb-edu"
    folder.mkdir()
    for name in ("finewebedu_val_000000.bin", "finewebedu_train_000001.bin"):
        (folder / name).write_bytes(shard(name))
    fetch(tmp_path, 1)
    assert server.asked == []


def test_a_kill_leaves_no_half_shard(server, tmp_path):
    """Killed in the middle of a shard, the command is given again and goes on; what was there is not fetched again."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from data import prepare; "
            f"prepare.FINEWEB_URL, prepare.SHARD = {prepare.FINEWEB_URL!r}, {TOKENS}; "
            f"prepare.prepare('fineweb-edu', Path({str(tmp_path)!r}), 2)")
    server.pause = 0.4
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(server.asked) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.wait()
    server.pause, found = 0, names(tmp_path / "fineweb-edu")
    assert "finewebedu_val_000000.bin" in found and "finewebedu_train_000001.bin" not in found
    assert "finewebedu_train_000001.bin.tmp" in found and "meta.json" not in found
    with pytest.raises(prepare.UserError, match="fineweb-edu --shards=1"):
        prepare.load("fineweb-edu", 8, folder=tmp_path)
    fetch(tmp_path, 2)
    assert server.asked.count("finewebedu_val_000000.bin") == 1
    assert names(tmp_path / "fineweb-edu") == sorted(set(server.asked) | {"meta.json"})


@pytest.mark.parametrize("argv, told", [
    (["fineweb-edu"], "--shards=None: expected 1 to 99"), (["fineweb-edu", "--shards=100"], "expected 1 to 99"),
    (["pystdlib", "--shards=1"], "--shards=1 has no effect on 'pystdlib'"), (["fineweb-edu", "--shards=9"], "GB more"),
], ids=["no number", "too many", "another set", "no room"])
def test_mistakes_are_one_line(server, tmp_path, monkeypatch, capsys, argv, told):
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda folder: type("Usage", (), dict(free=9 * TOKENS)))
    monkeypatch.setattr(prepare.prepare, "__defaults__", (tmp_path, None))
    assert prepare.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("prepare.py: ") and told in error and error.count("\n") == 1 and server.asked == []


def test_another_folder_is_left_alone(server, tmp_path):
    """A data set of the user's that has this name is not written into."""
    (tmp_path / "fineweb-edu").mkdir()
    (tmp_path / "fineweb-edu" / "train.bin").write_bytes(b"mine")
    with pytest.raises(prepare.UserError, match="not free"):
        fetch(tmp_path, 1)
    assert names(tmp_path / "fineweb-edu") == ["train.bin"]


def test_shards_are_one_split(server, tmp_path):
    """Batches and windows of several shards are those of one file with all their tokens, across the borders too, and
    nothing is read that is not asked for."""
    meta = fetch(tmp_path, 3)
    whole = np.concatenate([np.frombuffer(shard(name)[1024:], "<u2") for name in meta["shards"]["train"]])
    (tmp_path / "one").mkdir()
    whole.tofile(tmp_path / "one" / "train.bin")
    whole[:100].tofile(tmp_path / "one" / "val.bin")
    description, many, val = prepare.load("fineweb-edu", 300, folder=tmp_path)
    _, one, _ = prepare.load(str(tmp_path / "one"), 60, vocab_size=50304)
    one.block_size = 300
    assert all(isinstance(array, np.memmap) for array in many.tokens.arrays)
    for step in range(5):
        x, y = many.batch(7, 1, step)
        assert (x == one.batch(7, 1, step)[0]).all() and (y[:, :-1] == x[:, 1:]).all()
    windows = [np.concatenate([x for x, _ in split.fixed(0, 2)]) for split in (many, one)]
    assert (windows[0] == windows[1]).all() and len(windows[0]) == many.count(0) == 9
    assert (windows[0].ravel() == whole[:2700]).all()
    other = prepare.load("fineweb-edu", 8, folder=tmp_path)[0]
    fetch(tmp_path, 2)
    assert other == description
    with pytest.raises(prepare.UserError, match="its train is"):                # a resumed run would notice
        prepare.require_same(prepare.load("fineweb-edu", 8, folder=tmp_path)[0], description)


@pytest.mark.parametrize("wrong", [dict(train=[], val=["a"]), dict(train=["a"]), dict(train=[1], val=["a"]), ["a"]])
def test_a_wrong_list_of_shards_is_named(server, tmp_path, wrong):
    meta = fetch(tmp_path, 1)
    (tmp_path / "fineweb-edu" / "meta.json").write_text(prepare.json.dumps(meta | dict(shards=wrong)))
    with pytest.raises(prepare.UserError, match="shards is"):
        prepare.load("fineweb-edu", 8, folder=tmp_path)
    fetch(tmp_path, 1)                                                          # which the same command repairs
    prepare.load("fineweb-edu", 8, folder=tmp_path)


# --- Sizes -----------------------------------------------------------------------------------------
PAPER = {"450m": 450e6, "1b": 1e9}


@pytest.mark.parametrize("preset", PAPER)
@pytest.mark.parametrize("variant", VARIANTS)
def test_presets_have_the_papers_size(preset, variant, monkeypatch):
    """With the vocabulary of the authors' configuration, 57,601, each system has the paper's number of parameters
    within 2 %, and 11 d² or 10 d² a layer as the formulas say; steps and tokens are the paper's."""
    options, config = train.settle(dict(preset=preset, variant=variant), None, torch.device("cpu"))
    monkeypatch.setattr(ExoFormer, "init_weights", lambda self, seed: None)     # it draws, even for the meta device
    with torch.device("meta"):
        model = ExoFormer(train.replace(config, vocab_size=57601))
    total, hidden = model.num_params()
    d, N = config.n_embd, config.n_layer
    assert abs(total / PAPER[preset] - 1) < 0.02 and total - hidden == 2 * 57601 * d
    assert hidden == pytest.approx((11 if config.gate else 10) * d**2 * N, rel=0.015)           # anchors, λ, γ, norms
    assert config.n_head == 16 and config.block_size == 2048
    step = options.batch_size * options.gradient_accumulation_steps * config.block_size
    assert step == 262_144 and options.max_iters == -(-{"450m": 10, "1b": 20}[preset] * 10**9 // step)
    assert (options.muon_lr, options.adamw_lr, options.warmup_iters, options.z_loss) == (0.01, 0.003, 1000, 1e-5)


def test_a_depth_that_is_given_wins():
    for flags, depth in ((dict(variant="base"), 32), (dict(gate=False, mix="qkv"), 32), (dict(variant="base", n_layer=3), 3),
                         (dict(), 29), (dict(variant="base", gate=True), 29)):
        assert train.settle(dict(preset="450m") | flags, None, torch.device("cpu"))[1].n_layer == depth


# --- Loss ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("micro", [1, 2])
def test_z_loss_is_added(micro):
    """The gradient of a step is that of mean cross-entropy + z_loss · mean(log Σ exp(logits))², written out; what is
    reported is the cross-entropy alone."""
    config = Config.variant("exoformer", vocab_size=11, block_size=6, n_layer=1, n_head=2, n_embd=8)
    model = ExoFormer(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    idx = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(2))
    x, y = idx[:, :-1], idx[:, 1:]
    logits = model(x)[0]
    log_Z = torch.log(torch.exp(logits).sum(-1))
    cross_entropy = (log_Z - logits.gather(-1, y[..., None])[..., 0]).mean()
    wanted = torch.autograd.grad(cross_entropy + 0.7 * (log_Z ** 2).mean(), list(model.parameters()), allow_unused=True)
    plain = torch.autograd.grad(model(x, y)[1], list(model.parameters()), allow_unused=True)

    class Look(torch.optim.SGD):
        def step(self):
            self.seen = [p.grad.clone() for p in self.param_groups[0]["params"]]
    options = train.Options(batch_size=4 // micro, gradient_accumulation_steps=micro, z_loss=0.7, grad_clip=0)
    look = Look(model.parameters(), 0.1)
    look.param_groups[0]["peak_lr"] = 0.1
    loss, _ = train.training_step(model, x, y, 0, [look], options, nullcontext())
    assert loss == pytest.approx(cross_entropy.item(), abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(look.seen, wanted))
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(look.seen, plain))


def test_evaluation_does_not_depend_on_the_batch(tmp_path):
    """--eval_only takes the whole split in one pass: the loss is that of one window at a time."""
    np.random.default_rng(0).integers(11, size=301).astype("<u2").tofile(tmp_path / "val.bin")
    split = prepare.Split(tmp_path / "val.bin", 11, 6)
    torch.manual_seed(0)
    model = ExoFormer(Config.variant("exoformer", vocab_size=11, block_size=6, n_layer=1, n_head=2, n_embd=8)).double()
    torch.nn.init.normal_(model.W_head.weight)
    losses = [train.evaluate(model, split, train.Options(batch_size=size, eval_iters=0), torch.device("cpu"), nullcontext())
              for size in (1, 3, 8, 64)]
    x, y = split.windows(np.arange(50) * 6)
    one = model(torch.from_numpy(x), torch.from_numpy(y))[1].item()
    assert losses == pytest.approx([one] * 4, abs=1e-12)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("eval_only, terminal, bars", [(True, True, True), (True, False, False), (False, True, False)])
def test_only_eval_only_has_a_bar(tmp_path, monkeypatch, eval_only, terminal, bars):
    """A pass over 100M tokens shows how far it is; evaluations within training, and files, have no bar."""
    (np.arange(61) % 11).astype("<u2").tofile(tmp_path / "val.bin")
    split = prepare.Split(tmp_path / "val.bin", 11, 6)
    model = ExoFormer(Config.variant("base", vocab_size=11, block_size=6, n_layer=1, n_head=2, n_embd=8))
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    options = train.Options(batch_size=4, eval_iters=0, eval_only=eval_only)
    train.evaluate(model, split, options, torch.device("cpu"), nullcontext())
    assert ("10/10" in stream.getvalue()) == bars


# --- A signal between two looks ----------------------------------------------------------------------
def test_a_signal_behind_the_saving_waits_for_the_next_step(tmp_path, monkeypatch, capsys):
    """A signal that comes when a step's saving is decided stops the run after the next step, which is saved."""
    (np.arange(400) % 11).astype("<u2").tofile(tmp_path / "train.bin")
    (np.arange(100) % 11).astype("<u2").tofile(tmp_path / "val.bin")

    class Late(list):
        looks = 0

        def __bool__(self):
            self.looks += 1
            if self.looks == 2:                         # the second look in step 1, which has nothing to save
                self.append(signal.SIGTERM)
            return len(self) > 0

    @contextmanager
    def late():
        yield Late()
    monkeypatch.setattr(train, "first_signal", late)
    with pytest.raises(SystemExit):
        train.train(dict(dataset=str(tmp_path), vocab_size=11, out_dir=str(tmp_path / "out"), max_iters=9, n_layer=1,
                         n_head=1, n_embd=4, block_size=8, batch_size=2, eval_iters=2, device="cpu"))
    said = int(re.search(r"stopped after step (\d+)", capsys.readouterr().out)[1])
    assert train.load_checkpoint(tmp_path / "out" / "last.pt")[0]["step"] == said == 2
