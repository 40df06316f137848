"""
Make a data set for train.py, data/<name>/train.bin, val.bin and meta.json, and read it again.

    python data/prepare.py pystdlib        the running Python's own standard library: about 10 MB of code, no network
    python data/prepare.py shakespeare     tiny Shakespeare, 1.1 MB, by download
    python data/prepare.py my.txt          any file of yours, as bytes; its name without the ending names the data set

Tokens are bytes, so the vocabulary is 256. The .bin files are nanoGPT's: headerless little-endian uint16.
"""

import hashlib
import http.client
import json
import os
import platform
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent      # so that it works from any folder

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Tests, installed packages and generated tables
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class UserError(Exception):
    """A mistake of the user's: the message is one line with the value, what was expected and the remedy."""


# ---------------------------------------------------------------------------------------------------------------------
# Making

def stdlib(root: Path) -> tuple[bytes, bytes]:
    """Sources under root as (train, val): whole files in order of their paths, every tenth to val."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    paths = [p for p in paths if not LEFT_OUT & set(p.split("/")) and not p.startswith("_sysconfigdata")]
    files = [(root / p).read_bytes().replace(b"\r\n", b"\n") for p in paths]        # the same text on Windows
    return b"".join(f for i, f in enumerate(files) if i % 10 != 9), b"".join(files[9::10])


def split(text: bytes) -> tuple[bytes, bytes]:
    """(train, val): the last tenth is for validation."""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def download(url: str, sha256: str) -> bytes:
    """The file at url, checked, with a progress bar. Raises UserError; nothing reaches the disk."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            total = int(reply.headers.get("Content-Length") or 0) or None
            with tqdm(total=total, unit="B", unit_scale=True, desc="download") as bar:
                text = b""
                while piece := reply.read(1 << 16):
                    text += piece
                    bar.update(len(piece))
    except (OSError, http.client.HTTPException, ValueError) as error:   # unreachable, cut off, or not HTTP at all
        raise UserError(f"no download of {url} ({error}): fetch it by hand, save it as "
                        f"{HERE / 'shakespeare' / 'input.txt'} and run this again") from None
    check(text, sha256, url)
    return text


def check(text: bytes, sha256: str, origin) -> None:
    found = hashlib.sha256(text).hexdigest()
    if found != sha256:
        raise UserError(f"{origin} has SHA-256 {found}: expected {sha256}, fetch it again")


def write(folder: Path, train: bytes, val: bytes, source: str) -> dict:
    """Write both splits and, last, meta.json, each whole or not at all. Returns the meta data."""
    if not train or not val:
        raise UserError(f"{source} has {len(train) + len(val)} bytes: expected at least 10, enough for two splits")
    splits = {"train": train, "val": val}
    bins = {name: np.frombuffer(text, np.uint8).astype("<u2").tobytes() for name, text in splits.items()}
    meta = dict(name=folder.name, source=source, vocab_size=256, tokenizer="bytes",
                tokens={name: len(text) for name, text in splits.items()},
                sha256={name: hashlib.sha256(content).hexdigest() for name, content in bins.items()})
    folder.mkdir(parents=True, exist_ok=True)
    contents = {f"{name}.bin": content for name, content in bins.items()}
    for file, content in (contents | {"meta.json": json.dumps(meta, indent=1).encode()}).items():
        temporary = folder / f"{file}.tmp"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, folder / file)
        finally:
            temporary.unlink(missing_ok=True)
    return meta


def prepare(name: str, folder: Path = HERE) -> dict:
    """Make the data set `name` (pystdlib, shakespeare or the path of a file) below folder. Raises UserError."""
    if name == "pystdlib":
        train, val = stdlib(Path(sysconfig.get_path("stdlib")))
        source = f"standard library of Python {platform.python_version()}"
    elif name == "shakespeare":
        by_hand = folder / name / "input.txt"
        if by_hand.exists():
            check(by_hand.read_bytes(), SHAKESPEARE_SHA256, by_hand)
        train, val = split(by_hand.read_bytes() if by_hand.exists() else download(SHAKESPEARE_URL, SHAKESPEARE_SHA256))
        source = "tiny Shakespeare"
    else:
        path = Path(name)
        if not path.is_file():
            raise UserError(f"{name!r} is no file: expected pystdlib, shakespeare or the path of a text file")
        if path.stem in ("pystdlib", "shakespeare"):
            raise UserError(f"{name!r} would take the place of the data set {path.stem!r}: rename the file")
        name, (train, val), source = path.stem, split(path.read_bytes()), path.name
    return write(folder / name, train, val, source)


# ---------------------------------------------------------------------------------------------------------------------
# Reading

class Split:
    """One .bin file. Its ids are checked here, where they enter: the model never looks at them."""

    def __init__(self, path: Path, vocab_size: int, block_size: int):
        self.path, self.vocab_size, self.block_size = path, vocab_size, block_size
        self.tokens = np.memmap(path, dtype="<u2", mode="r")
        if len(self.tokens) < block_size + 1:
            raise UserError(f"{path} has {len(self.tokens)} tokens: expected at least block_size + 1 = "
                            f"{block_size + 1}, set a smaller --block_size")

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (the inputs one token later), int64 [len(starts), block_size] each."""
        rows = self.tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        if rows.max() >= self.vocab_size:
            raise UserError(f"{self.path} holds the id {rows.max()}: expected ids below vocab_size={self.vocab_size}")
        return rows[:, :-1], rows[:, 1:]

    def batch(self, size: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The training batch of a step, a pure function of (seed, step): nothing else can change or replay it."""
        return self.windows(np.random.default_rng((seed, step)).integers(len(self.tokens) - self.block_size, size=size))

    def fixed(self, count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same `count` windows at every call, spread evenly over the split, in batches of at most `size`."""
        starts = np.linspace(0, len(self.tokens) - self.block_size - 1, count).astype(np.int64)
        return (self.windows(starts[i:i + size]) for i in range(0, count, size))


def load(name: str, block_size: int, folder: Path = HERE) -> tuple[dict, Split, Split]:
    """meta.json's content and both splits of the data set; pystdlib is made where it is missing. Raises UserError."""
    path = folder / name
    if not (path / "meta.json").exists():
        if name != "pystdlib":
            raise UserError(f"--dataset={name}: no {path / 'meta.json'}, make it with data/prepare.py "
                            "(python data/prepare.py my.txt makes the data set my)")
        prepare(name, folder)
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    return meta, *(Split(path / f"{split}.bin", meta["vocab_size"], block_size) for split in ("train", "val"))


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.strip())
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        meta = prepare(argv[0])
    except (UserError, OSError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    print(f"data/{meta['name']}: {meta['tokens']['train']:,} training and {meta['tokens']['val']:,} validation tokens "
          f"from {meta['source']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
