"""
Train on several GPUs, or several processes of a CPU: train.py's loop, flags and files, with DistributedDataParallel.

    torchrun --nproc_per_node=8 experiments/distributed.py --preset=450m --out_dir=out-450m
    torchrun --nproc_per_node=8 experiments/distributed.py --init_from=resume --out_dir=out-450m
    torchrun --nproc_per_node=2 experiments/distributed.py --device=cpu

The flags mean what they mean to train.py, so the losses are those of one process: a step's batch_size ×
gradient_accumulation_steps sequences are shared out among the ranks, as are the validation windows and Muon's matrices.
Rank 0 alone writes. Its checkpoints resume here, with any number of processes, and in train.py, and the other way round.
"""

import os
import shlex
import signal
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train  # noqa: E402
from data.prepare import UserError  # noqa: E402

alone = SimpleNamespace(**vars(train))      # train.py's own functions; those below take their places in `main`
caught, agreed = [], []                     # signals: of this rank; of any rank, known to all since the same step
nets = []                                   # the model as it trains here, once the first step has made it


# --- One step ----------------------------------------------------------------------------------------
class Net(DistributedDataParallel):
    """Ranks average their gradients once a step, behind the last of its `micro` backward passes."""

    def __init__(self, net, micro: int):
        super().__init__(net)
        self.micro, self.passes = micro, 0

    def forward(self, *inputs):
        self.passes += 1
        self.require_backward_grad_sync = self.passes % self.micro == 0
        return super().forward(*inputs)


def shared_out(options: train.Options, world: int) -> train.Options:
    """What is left for each rank: a part of the micro-batches, or else a part of each. Raises UserError."""
    if options.gradient_accumulation_steps % world == 0:
        return replace(options, gradient_accumulation_steps=options.gradient_accumulation_steps // world)
    if options.batch_size % world == 0:
        return replace(options, batch_size=options.batch_size // world)
    raise UserError(f"--gradient_accumulation_steps={options.gradient_accumulation_steps} --batch_size={options.batch_size}: "
                    f"expected one that {world} processes can share, a multiple of {world}")


def fetch(split, options, step, device):
    """This rank's rows of the step's batch."""
    return tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in alone.fetch(split, options, step, device))


def training_step(net, x, y, step, optimizers, options, autocast):
    """The loss is the mean over ranks; the norm is of the averaged gradient, and not finite on all ranks or on none."""
    options = shared_out(options, dist.get_world_size())
    if not nets:
        nets.append(Net(net, options.gradient_accumulation_steps))
    loss, norm = alone.training_step(nets[0], x, y, step, optimizers, options, autocast)
    numbers = torch.tensor([loss, caught[0] if caught else 0], dtype=torch.float64, device=x.device)
    everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, numbers)
    losses, signals = torch.stack(everyone).T.tolist()
    agreed.extend(int(number) for number in signals if number and not agreed)
    return sum(losses) / len(losses), norm


class Muon(train.Muon):
    """Each matrix has one rank that steps it, and holds its momentum; the others get the result."""

    def __init__(self, params, *settings):
        super().__init__(params, *settings)
        ordered = sorted(self.param_groups[0]["params"], key=lambda p: p.shape)     # equal shares of every shape
        self.owner = {p: i % dist.get_world_size() for i, p in enumerate(ordered)}

    def step(self):
        for p, rank in self.owner.items():
            if rank != dist.get_rank():
                p.grad = None                                                       # which Muon passes over
        super().step()
        self.send({p: p.data for p in self.owner})

    def send(self, tensors: dict):
        """From each parameter's owner to all."""
        for wait in [dist.broadcast(tensor, self.owner[p], async_op=True) for p, tensor in tensors.items()]:
            wait.wait()

    def gather(self):
        """Momentum of all matrices on all ranks, for a checkpoint."""
        for p in self.owner:
            self.state[p].setdefault("momentum", torch.zeros_like(p))
        self.send({p: self.state[p]["momentum"] for p in self.owner})

    def keep_own(self):
        for p, rank in self.owner.items():
            if rank != dist.get_rank():
                self.state.pop(p, None)


# --- What surrounds the step -------------------------------------------------------------------------
def set_up(given):
    """On rank 0 first, which may have to make the data. An error of any rank is an error of all."""
    run = error = None
    for turn in (dist.get_rank() == 0, dist.get_rank() > 0):
        if turn:
            try:
                run = alone.set_up(given)
                shared_out(run.options, dist.get_world_size())
            except Exception as problem:
                if not isinstance(problem, (UserError, OSError)) and not alone.is_out_of_memory(problem):
                    raise
                error = str(problem)
        dist.barrier()
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise UserError(next(filter(None, errors)))
    run.peak_flops *= dist.get_world_size()
    run.optimizers[0].keep_own()
    return run


def evaluate(model, val, options, device, autocast):
    """Every rank takes some of the batches; the mean is over all windows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if val.count(options.eval_iters) <= (world - 1) * options.batch_size:           # some would have none
        return alone.evaluate(model, val, options, device, autocast)
    windows = [len(x) for x, _ in islice(val.fixed(options.eval_iters, options.batch_size), rank, None, world)]
    mine = SimpleNamespace(count=lambda _: sum(windows),
                           fixed=lambda *how: islice(val.fixed(*how), rank, None, world))
    total = torch.tensor([sum(windows) * alone.evaluate(model, mine, options, device, autocast), sum(windows)],
                         dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save_checkpoints(run, val_loss, last):
    run.optimizers[0].gather()
    if dist.get_rank() == 0:
        alone.save_checkpoints(run, val_loss, last)
    run.optimizers[0].keep_own()


@contextmanager
def first_signal():
    """Signals are only noted, a second one too: torchrun passes on what a terminal has sent to all already."""
    for number in train.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: caught.append(number))
    yield agreed


def resume_command(run):
    words = shlex.split(alone.resume_command(run))
    return shlex.join(["torchrun", f"--nproc_per_node={dist.get_world_size()}", str(Path(__file__).resolve()), *words[2:]])


def main(argv):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        given = train.parse(argv)                                                   # --help ends here
        if "sample" in given:
            raise UserError(f"--sample={given['sample']}: one process does that, see train.py")
        if "RANK" not in os.environ:
            raise UserError("no RANK in the environment: start it with torchrun --nproc_per_node=N experiments/distributed.py")
        cuda = given.get("device", "auto") in ("auto", "cuda") and torch.cuda.is_available()
        if cuda:
            given["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(min(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() - 1))
        elif given.get("device", "auto") not in ("auto", "cpu"):
            raise UserError(f"--device={given['device']}: expected cpu, or nothing for a GPU to each process")
        dist.init_process_group("nccl" if cuda else "gloo")
        ours = [fetch, training_step, Muon, set_up, evaluate, save_checkpoints, first_signal, resume_command]
        vars(train).update({thing.__name__: thing for thing in ours})
        if rank > 0:                                                                # which neither shows nor writes
            sys.stdout = open(os.devnull, "w")
            train.tqdm = lambda *args, **how: tqdm(*args, **how | dict(disable=True))
            train.run_folder, train.log_row = lambda run: nullcontext(), lambda *_: ""
            train.finish = lambda *_: None
        train.train(given)
        dist.barrier()
        dist.destroy_process_group()
        return 0
    except (UserError, OSError) as error:
        if rank == 0:
            print(f"distributed.py: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not dist.is_initialized() or not any(of in str(error) for of in ("Connection", "NCCL", "gloo", "peer")):
            raise
        print(f"distributed.py: rank {rank} of {world} lost another one: go on with --init_from=resume "
              f"({str(error).splitlines()[0]:.100})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
