"""
Several processes train as one: python -m pytest -q experiments/tests/test_distributed.py (about twenty seconds, CPU only)
"""

import csv
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from data.prepare import UserError  # noqa: E402
from exoformer import Config, ExoFormer  # noqa: E402

torch.set_num_threads(1)
SCRIPT = ROOT / "experiments" / "distributed.py"
QUIET = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")
FLAGS = dict(vocab_size=11, n_layer=3, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=2,
             max_iters=30, eval_interval=10, eval_iters=0, log_interval=1, warmup_iters=2, grad_clip=0.3, z_loss=0.01,
             max_new_tokens=0, device="cpu")
# a clipped gradient, two micro-batches, a validation split that two ranks share unevenly: 43 windows in batches of 4


@pytest.fixture(scope="module")
def distributed():
    spec = importlib.util.spec_from_file_location("distributed_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a learnable text of eleven letters, and what one process makes of it: out/one, 30 steps."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, n in (("train", 5000), ("val", 700)):
        (np.cumsum(draw.integers(0, 3, n)) % 11).astype("<u2").tofile(folder / f"{split}.bin")
    train.train(FLAGS | dict(dataset=str(folder), out_dir=str(folder / "one")))
    return folder


def argv(data, out, **flags):
    return [f"--{name}={value}" for name, value in (FLAGS | dict(dataset=data, out_dir=out) | flags).items()]


def start(*words, **environment):
    return subprocess.Popen([sys.executable, *map(str, words)], env=QUIET | environment, text=True, cwd=os.path.dirname(SCRIPT),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def two_ranks(words):
    """Both processes as torchrun would start them, without the seconds that it takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [start(SCRIPT, *words, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=port) for rank in (0, 1)]


def finish(*processes):
    return [process.communicate(timeout=120) + (process.returncode,) for process in processes]


def log(out):
    with open(out / "log.csv", newline="") as file:
        return [[float(row[name] or "nan") for name in ("step", "train_loss", "val_loss", "grad_norm")]
                for row in csv.DictReader(file)]


def wait_for(out, step, process):
    """Until the run has saved something, and its log has passed `step`."""
    deadline = time.monotonic() + 100
    while not ((out / "last.pt").exists() and len((out / "log.csv").read_text().splitlines()) > step):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_two_processes_are_one(data):
    """Started by torchrun, two processes have one's losses, norms and validation losses to 1e-5. A SIGTERM stops them
    after the same step; the checkpoint goes on in one process, to the same end."""
    out = data / "two"
    run = start("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT,
                *argv(data, out, max_iters=3000, decay_share=0))
    wait_for(out, 12, run)
    run.send_signal(signal.SIGTERM)
    [(printed, _, code)] = finish(run)
    stopped = int(re.search(r"stopped after step (\d+); resume with: torchrun --nproc_per_node=2 \S*distributed.py "
                            r"--init_from=resume --out_dir=\S+", printed)[1])
    assert code != 0 and len(log(out)) == stopped == train.load_checkpoint(out / "last.pt")[0]["step"]
    assert printed.count("step 10:") == 1 and not list(out.glob("*.tmp"))

    reference = data / "reference"
    more = dict(max_iters=stopped + 5, decay_share=0, dataset=str(data))
    train.train(FLAGS | more | dict(out_dir=str(reference)))
    train.train(dict(init_from="resume", out_dir=str(out)) | more)
    np.testing.assert_allclose(log(out), log(reference), atol=1e-5, rtol=0)
    weights = [train.load_checkpoint(of / "last.pt")[1].state_dict() for of in (out, reference)]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-4 for name in weights[0])


def test_one_process_goes_on_as_two(data):
    """A checkpoint of train.py goes on in two processes, its momentum included; both files hold all momentum."""
    out, alone = data / "on", data / "alone"
    for of in (out, alone):
        shutil.copytree(data / "one", of)
    train.train(dict(init_from="resume", out_dir=str(alone), dataset=str(data), max_iters=40))
    [(_, error, code), (silent, other, _)] = finish(*two_ranks(
        ["--init_from=resume", f"--out_dir={out}", f"--dataset={data}", "--max_iters=40", "--device=cpu"]))
    assert code == 0 and silent == other == "", error
    np.testing.assert_allclose(log(out), log(alone), atol=1e-5, rtol=0)
    states = [train.load_checkpoint(of / "last.pt")[0]["optimizer_state"] for of in (out, alone)]
    for name, state in states[1].items():
        assert state.keys() == states[0][name].keys()
        assert all((state[key] - states[0][name][key]).abs().max() < 1e-5 for key in state)


def test_a_signal_to_one_rank_stops_all(data):
    """Only rank 1 hears it; both leave after the same step, with the signal's exit status, the step saved."""
    out = data / "one-heard"
    ranks = two_ranks(argv(data, out, max_iters=3000))
    wait_for(out, 12, ranks[0])
    ranks[1].send_signal(signal.SIGINT)
    [(printed, _, code), (_, _, code_1)] = finish(*ranks)
    assert (code, code_1) == (130, 130) and train.load_checkpoint(out / "last.pt")[0]["step"] == len(log(out)) > 12
    assert "stopped after step" in printed


def test_a_dead_rank_ends_the_run(data):
    """Rank 1 is killed: rank 0 says so in a line and ends; the last checkpoint is whole, and nothing half is left."""
    out = data / "dead"
    ranks = two_ranks(argv(data, out, max_iters=3000))
    wait_for(out, 12, ranks[0])
    ranks[1].kill()
    [(_, error, code), _] = finish(*ranks)
    assert code == 1 and error.splitlines()[-1].startswith("distributed.py: rank 0 of 2 lost another one: go on with")
    assert "Traceback" not in error and train.load_checkpoint(out / "last.pt")[0]["step"] % 10 == 0
    assert not list(out.glob("*.tmp"))


def test_a_mistake_is_one_line_for_all(data):
    """What set_up refuses is said once, before anything is written, and no process waits for another."""
    words = argv(data, data / "none", batch_size=3, gradient_accumulation_steps=1)
    [(_, error, code), (_, other, code_1)] = finish(*two_ranks(words))
    assert (code, code_1, other) == (2, 2, "") and error.count("\n") == 1
    assert "expected one that 2 processes can share" in error and not (data / "none").exists()


@pytest.mark.parametrize("flag, told", [("--sample=a", "see train.py"), ("--seed=1", "start it with torchrun"),
                                        ("--nonsense=1", "is no flag"), ("--seed=x", "--seed")])
def test_what_no_process_can_do(distributed, monkeypatch, capsys, flag, told):
    monkeypatch.delenv("RANK", raising=False)
    assert distributed.main([flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("distributed.py: ") and told in error and error.count("\n") == 1


@pytest.mark.parametrize("accumulation, batch, world, left", [
    (4, 3, 2, (2, 3)), (1, 4, 2, (1, 2)), (8, 16, 8, (1, 16)), (3, 4, 2, (3, 2)), (1, 3, 2, None)])
def test_sequences_are_shared_out(distributed, accumulation, batch, world, left):
    """Micro-batches where their number allows, else parts of each: N shares are the whole step, or it is refused."""
    options = train.Options(gradient_accumulation_steps=accumulation, batch_size=batch)
    if left is None:
        with pytest.raises(UserError, match="a multiple of 2"):
            distributed.shared_out(options, world)
    else:
        part = distributed.shared_out(options, world)
        assert (part.gradient_accumulation_steps, part.batch_size) == left
        assert part.gradient_accumulation_steps * part.batch_size * world == accumulation * batch


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_matrix_has_one_owner(distributed, monkeypatch, world):
    """Muon's work is shared evenly, shape by shape."""
    model = ExoFormer(Config.variant("exoformer-dynamic", n_layer=4, n_head=2, n_embd=16))
    matrices, _ = train.split_parameters(model)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: world)
    owner = distributed.Muon(matrices, 0.01).owner
    assert owner.keys() == set(matrices) and set(owner.values()) <= set(range(world))
    for shape in {p.shape for p in matrices}:
        shares = np.bincount([rank for p, rank in owner.items() if p.shape == shape], minlength=world)
        assert shares.max() - shares.min() <= 1
