"""
Make a data set for train.py, data/<name>/train.bin, val.bin and meta.json, and read it again.

    python data/prepare.py pystdlib        the running Python's own standard library: about 10 MB of code, no network
    python data/prepare.py shakespeare     tiny Shakespeare, 1.1 MB, by download
    python data/prepare.py my.txt          any file of yours, as bytes; its name without the ending names the data set
    python data/prepare.py fineweb-edu --shards=N      the paper's data: N times 100M tokens of GPT-2's, 0.2 GB each

Tokens are bytes, so the vocabulary is 256. The .bin files are nanoGPT's: headerless little-endian uint16. The tokens of
fineweb-edu are its publisher's, in llm.c's files, which several together are one split.
"""

import argparse
import codecs
import hashlib
import http.client
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

try:
    import fcntl
except ImportError:             # on Windows
    fcntl = None

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
        for wait in (0.1, 0.4, 1, 2, None):
            try:
                os.replace(temporary, path)
                break
            except PermissionError:         # on Windows while a virus scanner reads path
                if wait is None:
                    raise
                time.sleep(wait)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises UserError while another process is in such a block for it (not noticed on Windows)."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)              # ends with the process, however that ends
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another process is writing into {folder}: wait for it, or name another folder") from None
    except OSError:
        pass                                                            # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------------------
# Making: a source yields its text in pieces, ("train" or "val", bytes), so that memory does not grow with it

PIECE = 1 << 20             # bytes


def stdlib(root: Path) -> Iterator[tuple[str, bytes]]:
    """Sources under root: whole files in order of their paths, every tenth to val."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    paths = [p for p in paths if not LEFT_OUT & set(p.split("/")) and not p.startswith("_sysconfigdata")]
    for i, p in enumerate(paths):
        text = (root / p).read_bytes().replace(b"\r\n", b"\n")         # the same text on Windows
        yield ("val" if i % 10 == 9 else "train"), text


def file_pieces(path: Path) -> Iterator[tuple[str, bytes]]:
    """A file, its last tenth to val. Raises UserError for a file too short for that."""
    size = path.stat().st_size
    if size < 10:
        raise UserError(f"{path} has {size} bytes: expected at least 10, enough for two splits")
    parts = {"train": size * 9 // 10, "val": size - size * 9 // 10}
    with open(path, "rb") as file, tqdm(total=size, unit="B", unit_scale=True, desc=path.name, delay=2) as bar:
        for split, left in parts.items():
            while piece := file.read(min(PIECE, left)):
                left -= len(piece)
                bar.update(len(piece))
                yield split, piece


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


SIGNATURES = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b\x08": "gzip", b"PK\x03\x04": "zip",
              b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"%PDF": "PDF"}


def warned(pieces: Iterable[tuple[str, bytes]], source: str) -> Iterator[tuple[str, bytes]]:
    """The same pieces; the first that is not UTF-8 text causes one warning, which says what it may be instead."""
    decode, kind = codecs.getincrementaldecoder("utf-8")().decode, None
    for split, piece in pieces:
        if kind is None:
            try:
                decode(piece)
            except UnicodeDecodeError as error:
                kind = f"byte {error.object[error.start]:#04x} is no character"
            if b"\0" in piece:
                kind = "binary, or UTF-16"
            if kind is not None:
                kind = next((name for start, name in SIGNATURES.items() if piece.startswith(start)), kind)
                print(f"warning: {source} is not UTF-8 text ({kind}): its bytes are taken as they are", file=sys.stderr)
        yield split, piece


def require_own(folder: Path, source: str,
                free: Iterable[str] = ("input.txt", "meta.json.tmp", "train.bin.tmp", "val.bin.tmp")) -> None:
    """Raises UserError unless the folder was made from this source, or has only `free` files in it: a download by hand,
    what a kill left."""
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not found <= set(free) and read_meta(folder).get("source") != source:
        holds = read_meta(folder).get("source", "files that this program did not make")
        raise UserError(f"{folder} is not free for {source}, it holds {holds}: rename the source or move that folder "
                        "away")


def write(folder: Path, pieces: Iterable[tuple[str, bytes]], source: str) -> dict:
    """Write both splits and meta.json. While they take their places, meta.json says that the folder is unfinished."""
    require_own(folder, source)
    tokens, sha256 = dict(train=0, val=0), dict(train=hashlib.sha256(), val=hashlib.sha256())
    with only_writer(folder):
        with replacing(folder / "train.bin") as train, replacing(folder / "val.bin") as val:
            for split, piece in pieces:
                ids = np.frombuffer(piece, np.uint8).astype("<u2").tobytes()
                dict(train=train, val=val)[split].write(ids)
                tokens[split] += len(piece)
                sha256[split].update(ids)
            with replacing(folder / "meta.json") as file:
                file.write(json.dumps(dict(source=source, unfinished=True)).encode())
        meta = dict(name=folder.name, source=source, vocab_size=256, tokenizer="bytes", tokens=tokens,
                    sha256={split: of.hexdigest() for split, of in sha256.items()},
                    ends={split: ends(folder / f"{split}.bin") for split in tokens})
        with replacing(folder / "meta.json") as file:
            file.write(json.dumps(meta, indent=1).encode())
    return meta


def prepare(name: str, folder: Path = HERE, shards: int | None = None) -> dict:
    """Make the data set `name` (pystdlib, shakespeare, fineweb-edu of 1 to 99 training shards, or the path of a file)
    below folder. Raises UserError."""
    if name == "fineweb-edu":
        if shards is None or not 1 <= shards <= len(FINEWEB["train"]):
            raise UserError(f"fineweb-edu with --shards={shards}: expected 1 to {len(FINEWEB['train'])}, 0.2 GB each; one "
                            "more is for validation")
        return fineweb_edu(folder / name, shards)
    if shards is not None:
        raise UserError(f"--shards={shards} has no effect on {name!r}: it is for fineweb-edu, drop it")
    if name == "pystdlib":
        source = f"standard library of Python {platform.python_version()}"
        return write(folder / name, stdlib(Path(sysconfig.get_path("stdlib"))), source)
    if name == "shakespeare":
        by_hand, source = folder / name / "input.txt", "tiny Shakespeare"
        require_own(folder / name, source)
        text = by_hand.read_bytes() if by_hand.exists() else download(SHAKESPEARE_URL, SHAKESPEARE_SHA256)
        check(text, SHAKESPEARE_SHA256, by_hand)
        cut = len(text) * 9 // 10
        return write(folder / name, [("train", text[:cut]), ("val", text[cut:])], source)
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{name!r} is no file: expected pystdlib, shakespeare, fineweb-edu or the path of a text file")
    if path.stem in ("pystdlib", "shakespeare", "fineweb-edu") or not path.stem.strip("."):
        raise UserError(f"{name!r} would make the data set {path.stem!r}, which is no free name: rename the file")
    source = str(path.resolve())
    return write(folder / path.stem, warned(file_pieces(path), source), source)


# ---------------------------------------------------------------------------------------------------------------------
# The paper's data, which come as tokens: each shard is on the disk whole, or not at all

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
FINEWEB = {"val": ["finewebedu_val_000000.bin"], "train": [f"finewebedu_train_{n:06}.bin" for n in range(1, 100)]}
SHARD = 100_000_000         # tokens of each file, but for the last one, which may have fewer


def require_shard(path: Path, name: str) -> int:
    """The tokens of the shard `name` at path. Raises UserError unless it is whole."""
    _, header, n = layout(path, guess=False)
    if header == 0 or not (n == SHARD or n < SHARD and name == FINEWEB["train"][-1]):
        raise UserError(f"{path} has {n:,} tokens{'' if header else ' and no header'}: expected {SHARD:,} and llm.c's header")
    return n


def fetch_shard(folder: Path, name: str, bar: tqdm) -> int:
    """Its tokens, once it is in folder: fetched, where it is missing or broken. Raises UserError after three tries."""
    try:
        return require_shard(folder / name, name)
    except (FileNotFoundError, UserError):
        pass
    for _ in range(3):
        start = bar.n
        try:
            with urllib.request.urlopen(FINEWEB_URL + name, timeout=30) as reply, replacing(folder / name) as file:
                while piece := reply.read(PIECE):
                    file.write(piece)
                    bar.update(len(piece))
                file.flush()
                return require_shard(Path(file.name), name)             # an error leaves nothing behind
        except (UserError, OSError, http.client.HTTPException, ValueError) as error:
            reason = error
            bar.update(start - bar.n)
    raise UserError(f"no download of {FINEWEB_URL + name} ({reason}): run this again, or fetch it by hand into {folder}")


def fineweb_edu(folder: Path, shards: int) -> dict:
    """The validation shard and the first `shards` of the training ones; what is there already is not fetched again."""
    names = {"val": FINEWEB["val"], "train": FINEWEB["train"][:shards]}
    wanted, source = names["val"] + names["train"], "FineWeb-Edu, GPT-2 tokens"
    ours = {name + end for name in FINEWEB["val"] + FINEWEB["train"] + ["meta.json"] for end in ("", ".tmp")}
    require_own(folder, source, ours)
    with only_writer(folder):
        size = 1024 + 2 * SHARD
        missing = sum(size for name in wanted if not (folder / name).exists())
        if missing > shutil.disk_usage(folder).free:
            raise UserError(f"--shards={shards} needs {missing / 1e9:,.1f} GB more, {folder} has "
                            f"{shutil.disk_usage(folder).free / 1e9:,.1f}: give fewer, or link that folder to a larger disk")
        with tqdm(total=missing, unit="B", unit_scale=True, desc="download", delay=1) as bar:
            tokens = {split: sum(fetch_shard(folder, name, bar) for name in of) for split, of in names.items()}
        # 50,257 ids, rounded up to a multiple of 64: a faster head
        meta = dict(name=folder.name, source=source, vocab_size=50304, tokenizer="gpt2", tokens=tokens, shards=names,
                    ends={split: ends(*(folder / name for name in of)) for split, of in names.items()})
        with replacing(folder / "meta.json") as file:                   # last: it never promises what is not there
            file.write(json.dumps(meta, indent=1).encode())
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# Reading

# First four bytes of a file with a header of 256 int32: this, a version, how many tokens. Then the ids
LLM_C = {20240520: "<u2", 20240801: "<u4"}
FOREIGN = SIGNATURES | {b"\x93NUMPY": "NumPy's .npy", b"PAR1": "Parquet", b"\x89HDF": "HDF5",
                        b"MMIDIDX": "a Megatron index"}


def layout(path: Path, guess: bool) -> tuple[np.dtype, int, int]:
    """(type of an id, bytes before the first one, how many) of a .bin file. Raises UserError for any other file.

    With `guess`, where nothing else says what is in it, a headerless file of ids wider than uint16 is recognised.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    for signature, kind in FOREIGN.items():
        if len(signature) > 2 and start.startswith(signature):
            raise UserError(f"{path} is a file of {kind}: expected nanoGPT's or llm.c's .bin, ids of uint16")
    magic, _, n = np.frombuffer(start[:12], "<i4").tolist() if size >= 12 else (0, 0, 0)
    if magic in LLM_C:
        dtype = np.dtype(LLM_C[magic])
        if size != 1024 + dtype.itemsize * n:
            raise UserError(f"{path} has {size} bytes, its header promises {1024 + dtype.itemsize * n} for {n} tokens: "
                            "it is cut off or damaged, copy it again")
        return dtype, 1024, n
    if size % 2:
        raise UserError(f"{path} has {size} bytes: expected an even number, two for each id; make it again")
    ids = np.frombuffer(start, "<u2")
    if guess and len(ids) >= 32 and ids[1::2].max() < 4 <= ids[::2].max():      # the upper halves of small numbers
        width = "uint32" if ids[2::4].any() else "int64"
        raise UserError(f"{path} holds {width}, it seems: expected uint16, make it again as such")
    return np.dtype("<u2"), 0, size // 2


class Shards:
    """Arrays end to end, as one that is never copied together: shards[places] for an array of places."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays, self.ends = arrays, np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        shard = np.searchsorted(self.ends, places, side="right")        # of each place
        ids = np.empty(places.shape, self.arrays[0].dtype)
        for i in np.unique(shard):
            ids[shard == i] = self.arrays[i][places[shard == i] - (self.ends[i] - len(self.arrays[i]))]
        return ids


class Split:
    """One .bin file, or several as one. Its ids are checked here, where they enter: the model never looks at them."""

    def __init__(self, paths: Path | list[Path], vocab_size: int, block_size: int, tokens: int | None = None):
        """`tokens`: how many there are to be, if meta.json knows."""
        paths = paths if isinstance(paths, list) else [paths]
        self.path, self.vocab_size, self.block_size = paths[0], vocab_size, block_size
        path, layouts = paths[0], [layout(path, guess=tokens is None) for path in paths]
        n = sum(of for _, _, of in layouts)
        if tokens not in (None, n):
            raise UserError(f"{path} has {n} tokens, its meta.json says {tokens}: it was cut off or replaced, "
                            "make the data again")
        if n < block_size + 1:
            raise UserError(f"{path}: {path.stem} has {n} tokens, needs at least block_size + 1 = {block_size + 1}: "
                            "set a smaller --block_size or give more text")
        arrays = [np.memmap(path, dtype, "r", header, (of,)) for path, (dtype, header, of) in zip(paths, layouts)]
        self.tokens = arrays[0] if len(arrays) == 1 else Shards(arrays)

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
        windows, count = self.count(0), self.count(count)
        starts = np.arange(count) * windows // count * self.block_size
        return (self.windows(starts[i:i + size]) for i in range(0, count, size))

    def count(self, most: int) -> int:
        """The windows that `fixed` gives where it is asked for `most`, 0 for all."""
        windows = (len(self.tokens) - 1) // self.block_size
        return min(most or windows, windows)


def ends(*paths: Path) -> str:
    """Size and SHA-256 of the first and last 64 KiB of each: the identity of large files in a moment."""
    sizes, digest = [path.stat().st_size for path in paths], hashlib.sha256()
    for path, size in zip(paths, sizes):
        with open(path, "rb") as file:
            for start in (0, max(0, size - 65536)):
                file.seek(start)
                digest.update(file.read(65536))
    return f"{sum(sizes)} bytes, {digest.hexdigest()}"


def read_meta(folder: Path) -> dict:
    """The folder's meta.json, {} if there is none. Raises UserError that names the field which is wrong."""
    path = folder / "meta.json"
    if not path.exists():
        return {}
    try:
        meta = json.loads(path.read_bytes().decode("utf-8-sig"))        # an editor may have put a mark before it
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): make the data again") from None
    if type(meta) is not dict:
        raise UserError(f"{path} is of type {type(meta).__name__}: expected an object, make the data again")

    def right(value, kind) -> bool:
        if type(value) is list:
            return kind is list and set(map(type, value)) == {str}
        return type(value) is kind and (kind is str or value >= 1)
    for field, kind in dict(source=str, vocab_size=int, tokenizer=str).items():
        if meta.get(field) is not None and not right(meta[field], kind):
            raise UserError(f"{path}: {field} is {meta[field]!r}, expected {kind.__name__}: make the data again")
    for field, kind in dict(tokens=int, sha256=str, ends=str, shards=list).items():
        of = meta.get(field)
        if of is not None and not (type(of) is dict and all(right(of.get(split), kind) for split in ("train", "val"))):
            raise UserError(f"{path}: {field} is {of!r}, expected {kind.__name__} of train and val: make the data "
                            "again")
    return meta


def find(name: str, folder: Path = HERE) -> Path:
    """A plain name is a folder below data/, or else of the working directory; all else is a path as in the shell."""
    plain = Path(name).name == name != ".."
    return folder / name if plain and (folder / name).is_dir() else Path(name).expanduser()


def load(name: str, block_size: int, vocab_size: int | None = None, folder: Path = HERE) -> tuple[dict, Split, Split]:
    """The data set's description and its two splits. Raises UserError.

    `name` is a folder below data/ (pystdlib is made where it is missing) or the path of any folder with nanoGPT's
    train.bin and val.bin, uint16 with or without llm.c's header. The description says name, vocab_size, tokenizer
    (None if unknown) and what identifies the content: train and val, from meta.json or from the files. Where meta.json
    lists shards, they take the place of the two files.
    """
    path = find(name, folder)
    if name == "pystdlib" and (not (path / "train.bin").is_file() or read_meta(path).get("unfinished")):
        path = folder / prepare(name, folder)["name"]
    meta = read_meta(path)
    if meta.get("unfinished"):
        raise UserError(f"--dataset={name}: {path} is half made, prepare.py did not come to its end: run it again")
    names = meta.get("shards") or {split: [f"{split}.bin"] for split in ("train", "val")}
    files = {split: [path / file for file in names[split]] for split in ("train", "val")}
    for file in files["train"] + files["val"]:
        if not file.is_file():
            what = {"shakespeare": "shakespeare", "fineweb-edu": "fineweb-edu --shards=1 (of 99, 0.2 GB each)"}
            raise UserError(f"--dataset={name}: no {file}, make it with: python '{HERE / 'prepare.py'}' "
                            + what.get(name, "my.txt (which makes the data set my)"))
    own = meta.get("vocab_size")            # a meta.pkl is not looked at: unpickling a file can run anything
    if vocab_size is None and own is None:
        raise UserError(f"--dataset={name}: no meta.json in it says the vocabulary, give --vocab_size "
                        "(GPT-2's is 50257)")
    if own is not None and (vocab_size or own) < own:
        raise UserError(f"--vocab_size={vocab_size}: {path / 'meta.json'} has {own}, give that or more")
    vocab_size = vocab_size or own
    tokens = meta.get("tokens") or {}
    splits = [Split(file, vocab_size, block_size, tokens.get(split)) for split, file in files.items()]
    description = dict(name=path.resolve().name, vocab_size=own or vocab_size, tokenizer=meta.get("tokenizer"))
    for split, of in files.items():
        found = ends(*of)
        if meta.get("ends") and meta["ends"][split] != found:
            raise UserError(f"{of[0]} is not the file that its meta.json was made for: make the data again")
        description[split] = meta["sha256"][split] if meta.get("sha256") else found
    return description, *splits


def require_same(data: dict, trained_on: dict) -> None:
    """Raises UserError unless both descriptions are of one data set; its name and place may differ."""
    for key in ("vocab_size", "train", "val"):
        if data[key] != trained_on[key]:
            raise UserError(f"--dataset={data['name']}: its {key} is {data[key]}, the checkpoint was trained on "
                            f"{trained_on[key]}: give that data set or train from scratch")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("prepare.py", description=__doc__.strip(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+", help="pystdlib, shakespeare, fineweb-edu, or the path of a file")
    parser.add_argument("--shards", type=int, help="of fineweb-edu's training data, 1 to 99")
    args = parser.parse_args(argv)
    sources = args.source
    try:
        if len(sources) > 1:
            raise UserError(f"{len(sources)} sources: expected one, join files first: "
                            f"cat {shlex.join(sources)} > all.txt")
        meta = prepare(sources[0], shards=args.shards)
    except (UserError, OSError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: stopped, no file is half written; the same command goes on", file=sys.stderr)
        return 130
    val = {"pystdlib": "every tenth file", "fineweb-edu": "a shard of its own"}.get(meta["name"], "its last tenth")
    print(f"data/{meta['name']}: {meta['tokens']['train']:,} training and {meta['tokens']['val']:,} validation tokens "
          f"({val}) from {meta['source']}; train with --dataset={shlex.quote(meta['name'])}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")           # a name that the terminal cannot spell is no error
    sys.exit(main(sys.argv[1:]))
