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
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent      # so that it works from any folder

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Tests, installed packages and generated tables
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


class UserError(Exception):
    """A mistake of the user's: one line, further ones are dropped, with the value, what was expected and the remedy."""

    def __str__(self) -> str:
        return super().__str__().strip().partition("\n")[0]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes path's place at the end of the block: whole, on the disk, or not at all.

    A kill in between leaves the old file and a path.tmp, which the next writer replaces; an error leaves no path.tmp.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())         # the content before the name, whatever the disk holds back
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        with replacing(folder / file) as out:
            out.write(content)
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

LLM_C_MAGIC = 20240520                      # llm.c's .bin files start with 256 int32: this, a version, how many tokens


class Split:
    """One .bin file. Its ids are checked here, where they enter: the model never looks at them."""

    def __init__(self, path: Path, vocab_size: int, block_size: int):
        self.path, self.vocab_size, self.block_size = path, vocab_size, block_size
        size = path.stat().st_size
        magic = np.fromfile(path, "<i4", 1)
        header = 1024 if size >= 1024 and magic == LLM_C_MAGIC else 0                   # bytes
        n, needed = (size - header) // 2, block_size + 1
        if n < needed:
            raise UserError(f"{path}: {path.stem} has {n} tokens, needs at least block_size + 1 = {needed}: "
                            "set a smaller --block_size or give more text")
        self.tokens = np.memmap(path, "<u2", "r", header, (n,))

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (the inputs one token later), int64 [len(starts), block_size] each."""
        places = starts[:, None] + np.arange(self.block_size + 1)
        rows = self.tokens[places].astype(np.int64)
        if rows.max() >= self.vocab_size:
            i = rows.argmax()
            raise UserError(f"{self.path}: token {places.flat[i]} is the id {rows.flat[i]}, expected ids below "
                            f"vocab_size={self.vocab_size}: make the data again or train with a larger --vocab_size")
        return rows[:, :-1], rows[:, 1:]

    def batch(self, size: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The training batch of a step, a pure function of (seed, step): nothing else can change or replay it."""
        return self.windows(np.random.default_rng((seed, step)).integers(len(self.tokens) - self.block_size, size=size))

    def fixed(self, count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same windows at every call, in batches of at most `size`, cut side by side: `count` of them, spread
        evenly over the split, or all where count is 0 or larger (but for a rest shorter than a window)."""
        windows = (len(self.tokens) - 1) // self.block_size
        count = min(count or windows, windows)
        starts = np.arange(count) * windows // count * self.block_size
        return (self.windows(starts[i:i + size]) for i in range(0, count, size))


def ends(path: Path) -> str:
    """Size and SHA-256 of the first and last 64 KiB: a large file's identity in a moment."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for start in (0, max(0, size - 65536)):
            file.seek(start)
            digest.update(file.read(65536))
    return f"{size} bytes, {digest.hexdigest()}"


def load(name: str, block_size: int, vocab_size: int | None = None, folder: Path = HERE) -> tuple[dict, Split, Split]:
    """The data set's description and its two splits. Raises UserError.

    `name` is a folder below data/ (pystdlib is made where it is missing) or the path of any folder with nanoGPT's
    train.bin and val.bin, uint16 with or without llm.c's header. The description says name, vocab_size, tokenizer
    (None if unknown) and what identifies the content: train and val, from meta.json or from the files.
    """
    if name == "pystdlib" and not (folder / name / "meta.json").exists():
        prepare(name, folder)
    path = folder / name if (folder / name).is_dir() else Path(name)
    missing = [str(path / f"{split}.bin") for split in ("train", "val") if not (path / f"{split}.bin").is_file()]
    if missing:
        raise UserError(f"--dataset={name}: no {missing[0]}, make it with: python '{HERE / 'prepare.py'}' "
                        + ("shakespeare" if name == "shakespeare" else "my.txt (which makes the data set my)"))
    meta = {}
    if (path / "meta.json").exists():
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            has = meta["vocab_size"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path / 'meta.json'}: expected JSON with a vocab_size, make it again") from None
        if (vocab_size or has) < has:
            raise UserError(f"--vocab_size={vocab_size}: {path / 'meta.json'} has {has}, give that or more")
    elif vocab_size is None:                # a meta.pkl is not looked at: unpickling a file can run anything
        raise UserError(f"--dataset={name}: no meta.json in it says the vocabulary, give --vocab_size "
                        "(GPT-2's is 50257)")
    vocab_size = vocab_size or meta["vocab_size"]
    description = dict(name=name, vocab_size=meta.get("vocab_size", vocab_size), tokenizer=meta.get("tokenizer"))
    for split in ("train", "val"):
        description[split] = meta.get("sha256", {}).get(split) or ends(path / f"{split}.bin")
    return description, *(Split(path / f"{split}.bin", vocab_size, block_size) for split in ("train", "val"))


def require_same(data: dict, trained_on: dict) -> None:
    """Raises UserError unless both descriptions are of one data set; its name and place may differ."""
    for key in ("vocab_size", "train", "val"):
        if data[key] != trained_on[key]:
            raise UserError(f"--dataset={data['name']}: its {key} is {data[key]}, the checkpoint was trained on "
                            f"{trained_on[key]}: give that data set or train from scratch")


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
