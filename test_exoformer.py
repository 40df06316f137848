"""
What this project claims, each claim a test: python -m pytest -q -n 2 test_exoformer.py (CPU, two or three minutes).

A fresh ExoFormer has zero logits whatever its variant, so two fresh models are always equal. Every test of equality,
causality or caching therefore begins with `randomise`, which gives every parameter a random non-zero value.
"""

import copy
import csv
import gc
import gzip
import hashlib
import html
import http.server
import importlib
import io
import itertools
import json
import math
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import warnings
import xml.etree.ElementTree
from contextlib import nullcontext
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from tqdm import tqdm

import exoformer
import train
from data import prepare
from exoformer import VARIANTS, Config, ExoFormer

ROOT = Path(__file__).resolve().parent
os.environ["CUDA_VISIBLE_DEVICES"] = ""     # on a machine with a GPU, too, the tests run on the CPU
for _number in train.SIGNALS:               # a shell's background job ignores some, and would ignore the tests' too
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
# Tests marked `source` quote lines of exoformer.py. Whoever rewrites such a line leaves them out: -m "not source"
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
torch.set_num_threads(1)            # the models of the tests are tiny: threads only cost

SMALL = dict(vocab_size=11, block_size=12, n_layer=3, n_head=2, n_embd=8)

# every row of the table of systems, and a step along every axis from rows where it makes sense
CASES = {name: Config.variant(name, **SMALL) for name in VARIANTS}
for _name, _row, _change in [
    ("scalar", "exoformer-dynamic", dict(granularity="scalar")),
    ("headwise", "exoformer-dynamic", dict(granularity="headwise")),
    ("headwise internal", "nuresformer", dict(granularity="headwise")),
    ("elementwise resformer", "resformer", dict(granularity="elementwise", anchor_norm="v")),
    ("dynamic resformer", "resformer", dict(dynamic=True)),
    ("dynamic nuresformer", "nuresformer", dict(dynamic=True)),
    ("mix vg", "exoformer", dict(mix="GV")),
    ("mix vg dynamic", "exoformer-dynamic", dict(mix="gv", granularity="headwise")),
    ("ungated", "exoformer", dict(gate=False, mix="qkv")),
    ("anchor norm qk", "exoformer", dict(anchor_norm="qk")),
    ("anchor norm none", "nuresformer", dict(anchor_norm="none")),
    ("post norm qkv", "exoformer", dict(post_norm="qkv")),
    ("post norm qkvg", "exoformer-dynamic", dict(post_norm="qkvg")),
    ("post norm of base", "base", dict(post_norm="qkv")),
    ("H_1", "exoformer", dict(anchor_layer=1)),
    ("H_2", "exoformer-dynamic", dict(anchor_layer=2, mix="kvg")),
]:
    CASES[_name] = Config.variant(_row, **SMALL | _change)

every_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES)
every_variant = pytest.mark.parametrize("config", list(CASES.values())[:7], ids=list(VARIANTS))


def randomise(model, scale=0.5):
    """Random non-zero values in every parameter: λ, gains, W2, b, the head and all."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) + ("norm" in name or ".lam." in name))
    assert all((p != 0).all() for p in model.parameters())
    return model


def make(config, dtype=torch.float64):
    return randomise(ExoFormer(config)).to(dtype)


def tokens(config, batch=2, length=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length or config.block_size), generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# The equations

def oracle(config, weights, idx):
    """The logits by the equations alone, in NumPy float64: no code and no structure shared with exoformer.py."""
    w = {name: p.detach().double().numpy() for name, p in weights.items()}
    (B, T), h, d_h = idx.shape, config.n_head, config.n_embd // config.n_head
    gated = "g" if config.gate else ""

    def norm(x, gain):
        return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def heads(x):
        return x.reshape(B, T, h, d_h)

    def rotate(x):
        out = np.empty_like(x)
        for t, i in itertools.product(range(T), range(d_h // 2)):
            angle = t * config.rope_theta ** (-2 * i / d_h)
            cos, sin = float(np.float32(math.cos(angle))), float(np.float32(math.sin(angle)))   # tables are float32
            a, b = x[:, t, :, i], x[:, t, :, i + d_h // 2]
            out[:, t, :, i], out[:, t, :, i + d_h // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    H = w["embed.weight"][idx.numpy()]
    anchor = None
    for n in range(1, config.n_layer + 1):
        layer = f"blocks.{n - 1}."
        if config.anchor == "exogenous" and n == config.anchor_layer + 1:
            anchor = {s: heads(H @ w[f"anchor.W_anc.{s}.weight"].T) for s in config.mix}
        X = norm(H, w[layer + "attn_norm.weight"])
        S = {s: heads(X @ w[f"{layer}attn.W.{s}.weight"].T) for s in "qkv" + gated}
        raw = dict(S)
        if anchor is not None:
            for j, s in enumerate(s for s in "qkvg" if s in config.mix):
                lam1, lam2 = (np.broadcast_to(x, (h, d_h)) for x in w[f"{layer}attn.mixing.lam.{s}"])
                a = norm(anchor[s], w[f"anchor.norm.{s}.weight"]) if s in config.anchor_norm else anchor[s]
                gamma = np.ones((B, T, 2))
                if config.dynamic:
                    u = X @ w[layer + "attn.mixing.W1.weight"].T
                    gelu = 0.5 * u * (1 + np.vectorize(math.erf)(u / math.sqrt(2)))
                    both = sigmoid(gelu @ w[layer + "attn.mixing.W2.weight"].T + w[layer + "attn.mixing.W2.bias"])
                    gamma = both[..., 2 * j:2 * j + 2]
                S[s] = (lam1 * gamma[..., :1, None]) * a + (lam2 * gamma[..., 1:, None]) * S[s]
        if config.anchor == "internal" and n == 1:
            anchor = raw
        for s in config.post_norm:
            S[s] = norm(S[s], w[f"{layer}attn.norm.{s}.weight"])
        q, k = rotate(S["q"]), rotate(S["k"])
        scores = np.einsum("bthc,bshc->bhts", q, k) / math.sqrt(d_h)
        scores[:, :, np.triu_indices(T, 1)[0], np.triu_indices(T, 1)[1]] = -np.inf
        A = np.exp(scores - scores.max(-1, keepdims=True))
        A /= A.sum(-1, keepdims=True)
        U = np.einsum("bhts,bshc->bthc", A, S["v"])
        if config.gate:
            U = U * sigmoid(S["g"])
        H = H + U.reshape(B, T, -1) @ w[layer + "attn.W_O.weight"].T
        z = norm(H, w[layer + "mlp_norm.weight"])
        up, gate = z @ w[layer + "mlp.W_up.weight"].T, z @ w[layer + "mlp.W_gate.weight"].T
        H = H + (gate * sigmoid(gate) * up) @ w[layer + "mlp.W_down.weight"].T
    return norm(H, w["norm.weight"]) @ w["W_head.weight"].T


@every_case
def test_logits_follow_the_equations(config):
    """In float64 the logits of every variant and axis are those of the NumPy oracle, and so is the loss."""
    model, idx = make(config), tokens(config)
    targets = tokens(config, seed=1)
    logits, loss = model(idx, targets)
    expected = oracle(config, dict(model.named_parameters()), idx)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    p = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(p, targets.numpy()[..., None], -1)).mean()
    assert loss.item() == pytest.approx(nats, rel=1e-9)


@every_case
def test_parameter_counts(config):
    """Parameters are exactly those of the formulas: 11d² or 10d² a layer, d² an anchor, λ, γ, gains."""
    d, h, N, m = config.n_embd, config.n_head, config.n_layer, len(config.mix)
    layer = (11 if config.gate else 10) * d**2 + 2 * d + len(config.post_norm) * d // h
    total = N * layer + d
    if config.anchor != "none":
        first = 1 if config.anchor == "internal" else config.anchor_layer
        lam = {"elementwise": 2 * m * d, "headwise": 2 * m * h, "scalar": 2 * m}[config.granularity]
        gamma = 16 * d + 16 * 2 * m + 2 * m if config.dynamic else 0
        total += (N - first) * (lam + gamma) + len(set(config.mix) & set(config.anchor_norm)) * d // h
        total += m * d**2 if config.anchor == "exogenous" else 0
    assert ExoFormer(config).num_params() == (total + 2 * config.vocab_size * d, total)


def test_flops_per_token():
    """FLOPs are 6 per matrix weight but the embedding's, and 12 N d T for attention; anchors add 4/(11 N)."""
    sizes = dict(n_layer=32, n_head=2, n_embd=64, block_size=16, vocab_size=10)
    exo, gated = (ExoFormer(Config.variant(name, **sizes)).flops_per_token() for name in ("exoformer", "gated"))
    assert gated == 6 * (32 * 11 * 64**2 + 10 * 64) + 12 * 32 * 64 * 16
    assert (exo - gated) / (6 * 32 * 11 * 64**2) == pytest.approx(4 / (11 * 32))


def test_dynamic_starts_as_static():
    """With λ = 1 and W2 = b = 0, as initialised, the dynamic model is the static one with λ = 0.5."""
    static, dynamic = make(CASES["exoformer"]), make(CASES["exoformer-dynamic"])
    fresh = {name: p.double() for name, p in ExoFormer(CASES["exoformer-dynamic"]).named_parameters()}
    state = dict(static.state_dict()) | {name: p for name, p in fresh.items() if ".mixing." in name}
    dynamic.load_state_dict(state)
    for block in static.blocks:
        for lam in block.attn.mixing.lam.values():
            torch.nn.init.constant_(lam, 0.5)
    idx = tokens(static.config)
    torch.testing.assert_close(dynamic(idx)[0], static(idx)[0], rtol=0, atol=1e-12)
    with torch.no_grad():
        dynamic.blocks[1].attn.mixing.W2.bias.fill_(0.3)
    assert (dynamic(idx)[0] - static(idx)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("case", ["exoformer", "nuresformer", "resformer", "H_1", "ungated", "mix vg"])
def test_neutral_mix_is_the_model_without_anchor(case):
    """λ = (0, 1) gives `gated`, or `base` where there is no gate, exactly."""
    model = make(CASES[case])
    plain = ExoFormer(replace(model.config, anchor="none", anchor_layer=0)).double()
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if name in plain.state_dict()})
    idx = tokens(model.config)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() > 1e-3
    with torch.no_grad():
        for name, lam in model.named_parameters():
            if ".lam." in name:
                lam[0], lam[1] = 0.0, 1.0
    assert torch.equal(model(idx)[0], plain(idx)[0])


@pytest.mark.parametrize("anchor_norm, scale_matters", [("qkvg", False), ("qk", True), ("none", True)])
def test_anchor_scale(anchor_norm, scale_matters):
    """Scaling W_anc changes nothing where all anchors are normalised, and something where they are not."""
    model = make(replace(CASES["exoformer"], anchor_norm=anchor_norm, norm_eps=0.0))
    idx = tokens(model.config)
    before = model(idx)[0]
    with torch.no_grad():
        for W in model.anchor.W_anc.values():
            W.weight.mul_(3.0)
    assert ((model(idx)[0] - before).abs().max() > 1e-6) == scale_matters


@every_case
def test_causality(config):
    """A later token changes nothing at earlier positions, and something at its own."""
    model, idx = make(config), tokens(config)
    for t in (1, 5, config.block_size - 1):
        other = idx.clone()
        other[:, t] = (idx[:, t] + 1) % config.vocab_size
        difference = (model(other)[0] - model(idx)[0]).abs().amax(dim=(0, 2))
        assert difference[:t].max() == 0 and difference[t] > 1e-4


@pytest.mark.parametrize("case", [name for name, config in CASES.items() if config.anchor == "exogenous"])
def test_anchor_gradient_comes_from_every_mixing_layer(case):
    """The anchor's gradient is the sum over the layers that mix, each of which contributes."""
    config = CASES[case]
    model, idx = make(config), tokens(config)
    weight = model.anchor.W_anc["v"].weight
    mixing = [block.attn.mixing for block in model.blocks if block.attn.mixing]

    def gradient(layers):
        def detach(mix, inputs):
            x, own, anchors = inputs
            return x, own, anchors if mix in layers else {s: a.detach() for s, a in anchors.items()}
        handles = [mix.register_forward_pre_hook(detach) for mix in mixing]
        loss = model(idx, tokens(config, seed=1))[1]
        [handle.remove() for handle in handles]
        return torch.autograd.grad(loss, weight)[0]

    parts = [gradient([mix]) for mix in mixing]
    assert len(parts) == config.n_layer - config.anchor_layer and all(part.abs().max() > 1e-8 for part in parts)
    torch.testing.assert_close(sum(parts), gradient(mixing), rtol=1e-8, atol=1e-12)


@every_case
def test_every_parameter_learns(config):
    """From a fresh start every parameter has a non-zero gradient after a few steps: nothing is dead or left out."""
    torch.manual_seed(0)
    model = ExoFormer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        model(tokens(config, 4), tokens(config, 4, seed=1))[1].backward()
        optimizer.step()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert dead == []


def test_only_named_components_mix():
    """With mix="vg" q and k stay local: no anchor, λ or γ of theirs exists and W_anc cannot move them."""
    model = make(CASES["mix vg dynamic"])
    mix = model.blocks[0].attn.mixing
    assert [list(x) for x in (model.anchor.W_anc, model.anchor.norm, mix.lam)] == [["v", "g"]] * 3
    assert mix.W2.out_features == 4
    seen = []
    handle = mix.register_forward_hook(lambda _, inputs, output: seen.append(output))
    idx = tokens(model.config)
    model(idx)
    torch.nn.init.normal_(model.anchor.W_anc["v"].weight)
    torch.nn.init.normal_(model.anchor.W_anc["g"].weight)
    model(idx)
    handle.remove()
    assert [torch.equal(seen[0][s], seen[1][s]) for s in "qkvg"] == [True, True, False, False]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_anchors_of_H_k(k):
    """With anchors from H_k only the layers after k own λ, and the anchors read H_k itself, not normalised."""
    model = make(replace(CASES["exoformer"], anchor_layer=k))
    assert [block.attn.mixing is not None for block in model.blocks] == [n > k for n in (1, 2, 3)]
    hidden, read = [], []
    model.embed.register_forward_hook(lambda _, inputs, output: hidden.append(output))
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: hidden.append(output[0]))
    model.anchor.W_anc["v"].register_forward_hook(lambda _, inputs, output: read.append(inputs[0]))
    model(tokens(model.config))
    assert len(read) == 1 and torch.equal(read[0], hidden[k])


# ---------------------------------------------------------------------------------------------------------------------
# Config, initialisation, precision

@pytest.mark.parametrize("change, words", [
    (dict(n_embd=30, n_head=4), "n_embd=30 n_head=4"),
    (dict(n_embd=6, n_head=2), "n_embd=6 n_head=2 even"),
    (dict(n_layer=0), "n_layer=0 1 to"),
    (dict(n_layer=2.0), "n_layer=2.0 int"),
    (dict(gate="no"), "gate='no' bool"),
    (dict(mix=None), "mix=None str"),
    (dict(anchor="exogenus"), "exogenus 'exogenous'"),
    (dict(granularity="elementwize"), "elementwize 'elementwise'"),
    (dict(mix="qx"), "mix='qx' qkvg"),
    (dict(anchor_norm="all"), "anchor_norm='all' none"),
    (dict(post_norm="v"), "post_norm='v' qkv"),
    (dict(gate=False), "mix='qkvg' gate=False"),
    (dict(gate=False, mix="qkv", post_norm="qkvg"), "post_norm='qkvg' gate=False"),
    (dict(anchor_layer=3), "anchor_layer=3 n_layer=3"),
    (dict(anchor_layer=-1), "anchor_layer=-1 0 or more"),
    (dict(anchor="internal", anchor_layer=1), "anchor_layer=1 anchor='internal'"),
    (dict(anchor="none", anchor_layer=1), "anchor_layer=1 anchor='none'"),
    (dict(anchor="none", dynamic=True), "dynamic=True anchor='none'"),
    (dict(anchor="internal", n_layer=1), "anchor='internal' n_layer=1"),
    (dict(mix="none"), "mix='none' anchor='exogenous'"),
    (dict(norm_eps=-1.0), "norm_eps=-1.0"),
    (dict(rope_theta=0.0), "rope_theta=0.0"),
])
def test_impossible_settings_raise(change, words):
    """A setting that cannot work is a ValueError that names the values; an unknown name gets its nearest match."""
    with pytest.raises(ValueError) as error:
        Config(**SMALL | change)
    assert all(word in str(error.value) for word in words.split()) and "\n" not in str(error.value)


def test_unknown_names_of_a_variant_raise():
    """Config.variant names the nearest match for an unknown variant or setting."""
    with pytest.raises(ValueError, match="did you mean 'nuresformer'"):
        Config.variant("nuresfromer")
    with pytest.raises(ValueError, match="did you mean 'n_layer'"):
        Config.variant("base", n_layers=3)


def test_settings_without_an_anchor_are_ignored():
    """Without an anchor mix, granularity and anchor_norm change nothing: no error, the same model."""
    odd = ExoFormer(Config.variant("base", **SMALL, mix="vg", anchor_norm="q", granularity="scalar"))
    assert {name: p.shape for name, p in odd.named_parameters()} == {
        name: p.shape for name, p in ExoFormer(CASES["base"]).named_parameters()}


def test_variants_are_the_seven_systems():
    """The seven rows have the gate, anchor, mix, norms, granularity and dynamics of the paper's systems."""
    got = {name: (c.gate, c.anchor, c.mix, c.anchor_norm, c.granularity, c.dynamic, c.anchor_layer, c.post_norm)
           for name, c in CASES.items() if name in VARIANTS}
    full = ("qkvg", "qkvg", "elementwise")
    assert got == {
        "base": (False, "none", *full, False, 0, "qk"),
        "gated": (True, "none", *full, False, 0, "qk"),
        "resformer": (False, "internal", "v", "", "scalar", False, 0, "qk"),
        "gated-resformer": (True, "internal", "v", "", "scalar", False, 0, "qk"),
        "nuresformer": (True, "internal", *full, False, 0, "qk"),
        "exoformer": (True, "exogenous", *full, False, 0, "qk"),
        "exoformer-dynamic": (True, "exogenous", *full, True, 0, "qk")}


def test_config_survives_a_round_trip():
    """asdict and back gives the same Config: that is how a checkpoint keeps it."""
    for config in CASES.values():
        assert Config(**json.loads(json.dumps(asdict(config)))) == config


def test_initialisation():
    """Fresh weights: W^O, W_down, head, W2 and b zero, gains 1, λ 0.5 (dynamic 1), the rest normal, cut at 0.06."""
    for name in VARIANTS:
        torch.manual_seed(0)
        model = ExoFormer(Config.variant(name, n_layer=2, n_head=2, n_embd=64))
        for key, p in model.named_parameters():
            if "norm" in key:
                assert (p == 1).all(), key
            elif ".lam." in key:
                assert (p == (1.0 if name == "exoformer-dynamic" else 0.5)).all(), key
            elif key == "W_head.weight" or ".W_O." in key or ".W_down." in key or ".W2." in key:
                assert (p == 0).all(), key
            else:
                assert p.std().item() == pytest.approx(0.0197, rel=0.1), key     # 0.02, less the tails cut off
                assert 0.05 < p.abs().max() <= 0.06, key


def test_one_seed_starts_all_variants_alike():
    """With one seed, parameters of one name start identical in every variant; another seed starts elsewhere."""
    def start(name, seed):
        torch.manual_seed(seed)
        return ExoFormer(Config.variant(name, **SMALL)).state_dict()

    full = start("exoformer-dynamic", 0)
    for name in VARIANTS:
        for key, p in start(name, 0).items():
            assert ".lam." in key or torch.equal(p, full[key]), key
    assert set(start("gated", 0)) <= set(start("exoformer", 0))
    assert not torch.equal(start("gated", 1)["embed.weight"], full["embed.weight"])
    drawn = [p for key, p in full.items() if key.endswith("attn.W.q.weight")]
    assert not torch.equal(drawn[0], drawn[1])


def test_uninitialised_parameter_raises():
    """A parameter that no row of init_weights covers is an error, and so is one that two rows cover."""
    model = ExoFormer(CASES["exoformer"])
    model.blocks[0].bonus = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="bonus.*matches 0 rows"):
        model.init_weights(0)
    del model.blocks[0].bonus
    model.blocks[0].attn.norm.register_module("W_O", exoformer.RMSNorm(2, 0.0))     # "*norm*.weight" and "*.W_O.weight"
    with pytest.raises(ValueError, match="norm.W_O.weight.*matches 2 rows"):
        model.init_weights(0)


def test_rope_table():
    """cos² + sin² = 1, angles as in float64 at position 4095, and no two positions alike, unlike in bfloat16."""
    table = exoformer.rope_table(4096, 64, 500_000.0).squeeze(2)
    (cos, minus_sin), (again, sin) = table.chunk(2, dim=-1)
    assert torch.equal(cos, again) and torch.equal(minus_sin, -sin)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(4096, 32))
    for i in (0, 1, 31):
        assert cos[4095, i].item() == pytest.approx(math.cos(4095 * 500_000.0 ** (-2 * i / 64)), abs=1e-7)
    assert len(torch.unique(torch.cat((cos, sin), 1), dim=0)) == 4096
    assert len(torch.unique(torch.cat((cos, sin), 1)[:, :1].bfloat16(), dim=0)) < 4096


def test_rope_depends_on_distance_alone():
    """The product of a rotated query and key depends only on how far apart they stand."""
    cos, sin = exoformer.rope_table(16, 8, 100.0).double().unbind()
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = (s.expand(1, 16, 1, 8) for s in (q, k))
    q, k = exoformer.rope(q, cos, sin)[0, :, 0], exoformer.rope(k, cos, sin)[0, :, 0]
    scores = q @ k.T
    for distance in range(5):
        assert (scores.diagonal(distance) - scores[0, distance]).abs().max() < 1e-6
    assert (scores[0] - scores[0, 0]).abs()[1:].min() > 1e-3


def test_rope_table_keeps_float32():
    """The table survives .bfloat16(), .double(), .to() and deepcopy unrounded, and is not in the state dict."""
    model = ExoFormer(CASES["exoformer"])
    table = model.cos_sin.clone()
    for cast in (lambda m: m.bfloat16(), lambda m: m.to("cpu", torch.float16), lambda m: m.double()):
        other = cast(copy.deepcopy(model))
        assert other.cos_sin.dtype == torch.float32 and torch.equal(other.cos_sin, table)
    assert not any("cos_sin" in key for key in model.state_dict())


@every_variant
def test_dtypes(config):
    """bfloat16, float32 and autocast give float64's logits within their precision; losses are float32 or better."""
    exact, idx = make(config), tokens(config)
    reference = exact(idx)[0]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        logits, loss = copy.deepcopy(exact).to(dtype)(idx, idx)
        assert logits.dtype == dtype and loss.dtype == torch.float32
        assert (logits.double() - reference).norm() / reference.norm() < tolerance
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = exact.float()(idx, idx)
    assert loss.dtype == torch.float32 and (logits.double() - reference).norm() / reference.norm() < 0.1
    loss.backward()


@every_case
def test_autocast_of_a_gpu_keeps_bfloat16(config):
    """Under CUDA's autocast, whose rms_norm gives float32, all between projection and attention stays bfloat16.

    Seen without a GPU: fake tensors on "cuda" have no values, but the dtypes that a GPU would give them.
    """
    seen = []                                   # (where, dtypes)

    def note(module, inputs, output):
        if type(module) is exoformer.Mixing:    # of X, own, anchors: X comes from the float32 stream
            inputs, output = (*inputs[1].values(), *inputs[2].values()), output.values()
        seen.append((type(module).__name__, {x.dtype for x in (*inputs, *output)}))

    def attend(q, k, v, original=exoformer.attend):
        seen.append(("attend", {x.dtype for x in (q, k, v)}))
        return original(q, k, v)
    model = ExoFormer(config)
    anchors, attention = [model.anchor] if model.anchor else [], [block.attn for block in model.blocks]
    norms = [norm for part in (*anchors, *attention) for norm in part.norm.values()]
    mixing = [attn.mixing for attn in attention if attn.mixing is not None]
    for module in (*norms, *mixing, *(attn.W_O for attn in attention)):
        module.register_forward_hook(note)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(exoformer, "attend", attend)
            patch.setattr(torch.Tensor, "__getitem__", lambda x, at: x.narrow(1, 0, at[1].stop))   # [:, 0:T] fails
            x = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
            assert F.rms_norm(x, (3,)).dtype == torch.float32           # what makes this test worth having
            state = {name: torch.empty(p.shape, device="cuda")
                     for name, p in (*model.named_parameters(), ("cos_sin", model.cos_sin))}
            torch.func.functional_call(model, state, torch.zeros(2, 5, dtype=torch.int64, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert all(dtypes == {torch.bfloat16} for _, dtypes in seen), seen
    assert len(seen) == len(norms) + len(mixing) + 2 * len(attention)


@every_variant
def test_compiles_in_one_graph(config):
    """torch.compile(fullgraph=True) takes every variant at several lengths, with the eager logits and gradients."""
    torch._dynamo.reset()
    model = make(replace(config, n_layer=2))
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True, backend="eager")
    for length in (12, 7, 5):
        idx = tokens(config, length=length)
        (logits, loss), (eager_logits, eager_loss) = compiled(idx, idx), eager(idx, idx)
        torch.testing.assert_close(logits, eager_logits)
        loss.backward()
        eager_loss.backward()
    for p, q in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiles_with_the_default_backend():
    """The default backend gives the eager model's loss and gradients."""
    torch._dynamo.reset()
    model, idx = make(replace(CASES["exoformer-dynamic"], n_layer=1), torch.float32), tokens(CASES["base"])
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True)
    losses = [net(idx, idx)[1] for net in (compiled, eager)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for p, q in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Forward, cache and generation

@every_case
@pytest.mark.parametrize("batch", [1, 3])
def test_cached_logits_equal_uncached(config, batch):
    """However the tokens are cut into chunks, cached logits are those of one uncached forward, to 1e-5 in float32."""
    model, idx = make(config, torch.float32), tokens(config, batch)
    with torch.no_grad():
        expected = model(idx)[0]
        for chunks in ([12], [1] * 12, [5, 7], [1, 4, 1, 1, 5], [7, 1, 3, 1]):
            cache = model.new_cache()
            logits = torch.cat([model(chunk, cache=cache)[0] for chunk in idx.split(chunks, dim=1)], dim=1)
            assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@every_variant
@pytest.mark.parametrize("before", [[], [1], [4], [1, 3]], ids=["empty", "one token", "a chunk", "two chunks"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chunk_sees_what_an_uncached_forward_sees(config, before, length):
    """A chunk of one, two or three tokens on a cache that is empty, has one token or more: the mask is right."""
    model, idx = make(config), tokens(config, 2)
    past = sum(before)
    cache = model.new_cache()
    with torch.no_grad():
        for chunk in idx[:, :past].split(before, dim=1) if before else ():
            model(chunk, cache=cache)
        logits = model(idx[:, past:past + length], cache=cache)[0]
        torch.testing.assert_close(logits, model(idx[:, :past + length])[0][:, past:])


def test_forward_refuses_what_it_cannot_do():
    """A sequence longer than block_size, cached tokens included, and targets of another shape are errors."""
    model, idx = make(CASES["exoformer"]), tokens(CASES["exoformer"], length=13)
    with pytest.raises(ValueError, match="13 tokens.*block_size=12"):
        model(idx)
    cache = model.new_cache()
    model(idx[:, :8], cache=cache)
    with pytest.raises(ValueError, match="13 tokens.*block_size=12"):
        model(idx[:, 8:], cache=cache)
    with pytest.raises(ValueError, match=r"\[2, 11\].*\[2, 12\]"):
        model(idx[:, :12], idx[:, 1:12])


def test_forward_leaves_no_state():
    """A forward, a cached one and a generation leave nothing on any module."""
    model = make(CASES["exoformer-dynamic"], torch.float32)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    idx = tokens(model.config)
    model(idx)
    model.generate(idx[:, :3], 3)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


@every_variant
def test_greedy_generation_equals_recomputing(config):
    """Temperature 0 is greedy: each token is the argmax of an uncached forward, until the context is full."""
    model, idx = make(config, torch.float32), tokens(config, 3, 2)
    out = model.generate(idx, 10, temperature=0)
    assert out.shape == (3, 12) and torch.equal(out[:, :2], idx)
    for t in range(2, 12):
        assert torch.equal(out[:, t], model(out[:, :t])[0][:, -1].argmax(-1))
    assert torch.equal(out, model.generate(idx, 10, temperature=1.0, top_k=1))


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_generation_goes_on_past_the_block(block_size):
    """Past block_size the model starts again from the last half block; a longer prompt is cut to its last block."""
    model = make(replace(CASES["exoformer"], block_size=block_size), torch.float32)
    idx = tokens(model.config, 2, 7)
    out = model.generate(idx, 11, temperature=0)
    length = min(7, block_size)                                 # what the model sees before each new token
    for t in range(7, 18):
        assert torch.equal(out[:, t], model(out[:, t - length:t])[0][:, -1].argmax(-1))
        length = length + 1 if length < block_size else (block_size + 1) // 2


def test_stream_yields_what_generate_returns():
    """stream yields generate's tokens one by one; two interleaved streams do not influence each other."""
    model, idx = make(CASES["exoformer-dynamic"], torch.float32), tokens(CASES["base"], 2, 3)
    seeded = lambda seed: torch.Generator().manual_seed(seed)                                           # noqa: E731
    whole = [model.generate(idx, 20, top_k=5, generator=seeded(seed))[:, 3:] for seed in (0, 1)]
    assert not torch.equal(*whole)
    pairs = list(zip(*(model.stream(idx, 20, top_k=5, generator=seeded(seed)) for seed in (0, 1))))
    for j in (0, 1):
        assert torch.equal(torch.stack([pair[j] for pair in pairs], dim=1), whole[j])


@pytest.mark.parametrize("how", [dict(temperature=0), dict(top_k=3), {}], ids=str)
def test_generated_tokens_are_ordinary_tensors(how):
    """Generated tokens can be trained on: no inference tensors, though the forward that gives them makes them."""
    model = make(CASES["exoformer-dynamic"], torch.float32)
    idx = model.generate(tokens(model.config, 1, 1), 5, **how)
    assert not any(token.is_inference() for token in model.stream(idx, 3, **how))
    model(idx, idx)[1].backward()


def test_sampling_draws_from_the_model():
    """Frequencies of sampled tokens are softmax(logits / temperature) of the top_k; top_k above V is clamped."""
    model, idx = make(CASES["exoformer"], torch.float32), tokens(CASES["base"], 1, 4)
    logits = model(idx)[0][0, -1]
    for temperature, top_k in ((1.0, None), (2.0, 4), (1.5, 99)):
        kept = logits.topk(min(top_k or 11, 11)).indices
        expected = torch.zeros(11).scatter(0, kept, F.softmax(logits[kept] / temperature, dim=-1))
        drawn = model.generate(idx.expand(20_000, 4), 1, temperature, top_k, torch.Generator().manual_seed(0))[:, -1]
        frequency = drawn.bincount(minlength=11) / 20_000
        assert (frequency - expected).abs().max() < 0.015
        assert (frequency[expected == 0] == 0).all()
    assert torch.equal(model.generate(idx, 9, temperature=1e-40), model.generate(idx, 9, temperature=0))


@pytest.mark.parametrize("arguments, message", [
    (dict(idx=torch.zeros(1, 0, dtype=torch.long)), "T >= 1"),
    (dict(idx=torch.zeros(3, dtype=torch.long)), r"shape \[3\]"),
    (dict(idx=torch.tensor([[0, 11]])), "0 to 11: expected 0 to 10"),
    (dict(idx=torch.tensor([[-1, 3]])), "-1 to 3"),
    (dict(temperature=-0.5), "temperature=-0.5"),
    (dict(temperature=math.nan), "temperature=nan"),
    (dict(top_k=0), "top_k=0"),
    (dict(max_new_tokens=-1), "max_new_tokens=-1"),
])
def test_generate_refuses_nonsense(arguments, message):
    """An empty prompt, ids outside the vocabulary, a negative temperature or count and top_k=0 are ValueErrors."""
    with pytest.raises(ValueError, match=message):
        make(CASES["exoformer"]).generate(**dict(idx=torch.zeros(1, 1, dtype=torch.long), max_new_tokens=1) | arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers

def test_each_parameter_has_one_optimizer():
    """Muon gets exactly the hidden matrices, AdamW embedding, head, gains, λ of any granularity and b."""
    for config in CASES.values():
        model = ExoFormer(config)
        muon, adamw = ({id(p) for p in group} for group in train.split_parameters(model))
        assert not muon & adamw and muon | adamw == {id(p) for p in model.parameters()}
        for name, p in model.named_parameters():
            hidden_matrix = name.startswith(("blocks.", "anchor.")) and p.ndim == 2 and ".lam." not in name
            assert (id(p) in muon) == hidden_matrix, name
    model.blocks[0].register_parameter("bonus", torch.nn.Parameter(torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="bonus.*0 optimizers"):
        train.split_parameters(model)


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (32, 64)])
def test_orthogonalise_against_the_svd(shape):
    """Newton-Schulz keeps the singular vectors and moves singular values near 1, each matrix of a stack by itself."""
    g = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = train.orthogonalise(g * torch.tensor([1e-3, 1.0, 1e3])[:, None, None])
    U, S, Vh = torch.linalg.svd(g, full_matrices=False)
    sigma = U.mT @ x @ Vh.mT                                            # diagonal, if the singular vectors are kept
    diagonal = sigma.diagonal(dim1=1, dim2=2)
    assert (sigma - torch.diag_embed(diagonal)).abs().max() < 1e-9
    assert diagonal[S > 0.05 * S.amax(1, keepdim=True)].min() > 0.6 and diagonal.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_against_torch(dtype):
    """Several steps of Muon are those of torch.optim.Muon, up to bfloat16, with the gradients left alone."""
    shapes = [(16, 16), (16, 16), (32, 16), (16, 32)]
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    muon = train.Muon(ours, lr=0.05, weight_decay=0.1, dtype=dtype)
    oracle_muon = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True)
    for _ in range(4):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        muon.step()
        oracle_muon.step()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs))
    for p, q, first in zip(ours, theirs, start):
        assert (p - q).norm() / (q - first).norm() < 0.02


def test_muon_skips_parameters_without_gradient():
    """A parameter that no loss reached stays as it is, as with torch's own optimizers."""
    used, unused = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    used.grad = torch.eye(4)
    train.Muon([used, unused], lr=0.1).step()
    assert (unused == 1).all() and (used != 1).any()


def test_schedule():
    """Linear warm-up to 1, constant, and the last share linearly down to 0.1 in the very last step."""
    for share, last in ((0.2, 20), (0.5, 50)):
        factors = [train.lr_factor(step, 100, 10, share) for step in range(100)]
        np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10)
        assert factors[10:100 - last] == [1.0] * (90 - last)
        np.testing.assert_allclose(factors[-last:], 1 - 0.9 * np.arange(1, last + 1) / last)


def test_overfits_one_batch():
    """With the optimizers of train.py a small model learns one batch by heart."""
    torch.manual_seed(0)
    config = Config.variant("exoformer-dynamic", **SMALL | dict(n_embd=32))
    model, idx = ExoFormer(config), tokens(config, 4)
    options = train.Options(muon_lr=0.02, adamw_lr=0.01, weight_decay=0.0)
    optimizers = train.make_optimizers(model, options, torch.device("cpu"))
    for _ in range(60):             # at the peak rates: step 100 of 750
        loss, _ = train.training_step(model, idx[:, :-1], idx[:, 1:], 100, optimizers, options, nullcontext())
    assert loss < 0.1               # from ln 11 = 2.4


# ---------------------------------------------------------------------------------------------------------------------
# Data

def write_data(folder, train_text, val_text, source="a test"):
    """A data set of two texts, in place of one from another source that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    return prepare.write(folder, [("train", train_text), ("val", val_text)], source)


def test_data_round_trip(tmp_path):
    """A file becomes two .bin files of little-endian uint16 that give its bytes again, and a meta.json that fits."""
    text = bytes(range(256)) * 4 + "Grüße\r\n".encode()
    (tmp_path / "my text.txt").write_bytes(text)
    assert prepare.prepare(str(tmp_path / "my text.txt"), tmp_path)["name"] == "my text"
    meta = json.loads((tmp_path / "my text" / "meta.json").read_text(encoding="utf-8"))
    raw = {split: (tmp_path / "my text" / f"{split}.bin").read_bytes() for split in ("train", "val")}
    assert b"".join(raw.values()) == b"".join(bytes((byte, 0)) for byte in text)
    assert meta["tokens"] == {"train": len(text) * 9 // 10, "val": len(text) - len(text) * 9 // 10}
    assert meta["sha256"] == {split: hashlib.sha256(content).hexdigest() for split, content in raw.items()}
    assert (meta["vocab_size"], meta["tokenizer"]) == (256, "bytes")
    assert sorted(path.name for path in (tmp_path / "my text").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    _, split, _ = prepare.load("my text", 8, folder=tmp_path)
    x, y = split.windows(np.array([0, 100]))
    assert bytes(x[1].tolist()) == text[100:108] and bytes(y[1].tolist()) == text[101:109]


def test_default_data_set_makes_itself(tmp_path, monkeypatch):
    """Loading pystdlib where it is missing makes it from the running Python's sources; any other name is an error."""
    (tmp_path / "lib").mkdir()
    for i in range(10):
        (tmp_path / "lib" / f"m{i}.py").write_text("x = 1\n" * 5, encoding="utf-8")
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    _, split, val = prepare.load("pystdlib", 8, folder=tmp_path)
    meta = json.loads((tmp_path / "pystdlib" / "meta.json").read_text(encoding="utf-8"))
    assert meta["source"].endswith(".".join(map(str, sys.version_info[:3])))
    assert (len(split.tokens), len(val.tokens)) == (9 * 30, 30)
    for name, command in (("other", "prepare.py' my.txt"), ("shakespeare", "prepare.py' shakespeare")):
        with pytest.raises(prepare.UserError, match=f"--dataset={name}: .*train.bin.*{command}"):
            prepare.load(name, 8, folder=tmp_path)


def test_stdlib_split(tmp_path):
    """Whole files, sorted by path, every tenth to val; no tests, no installed packages; Windows newlines made alike."""
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_bytes(b"%d\r\n" % i)
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_bytes(b"no")
    texts = dict(train=b"", val=b"")
    for split, text in prepare.stdlib(tmp_path):
        texts[split] += text
    assert texts == dict(train=b"".join(b"%d\n" % i for i in range(20) if i not in (9, 19)), val=b"9\n19\n")


@pytest.fixture
def server(tmp_path):
    """A folder and its address on a local HTTP server."""
    (tmp_path / "served").mkdir()
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "served"))

        def do_GET(self):
            if self.path == "/cut%20off":               # promises a byte more than comes
                self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nTo be")
            else:
                super().do_GET()

        def log_message(self, *_):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_shakespeare_by_download(tmp_path, server, monkeypatch):
    """A download that has the right hash becomes a data set; a wrong one or none leaves no file and says what to do."""
    served, address = server
    text = b"To be, or not to be. " * 50
    (served / "input.txt").write_bytes(text)
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", f"{address}/input.txt")
    with pytest.raises(prepare.UserError, match="SHA-256"):
        prepare.prepare("shakespeare", tmp_path / "wrong")
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(text).hexdigest())
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", f"{address}/missing.txt")
    with pytest.raises(prepare.UserError, match="by hand, save it as"):
        prepare.prepare("shakespeare", tmp_path / "wrong")
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", f"{address}/cut%20off")
    with pytest.raises(prepare.UserError, match="by hand, save it as"):
        prepare.prepare("shakespeare", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", f"{address}/input.txt")
    assert prepare.prepare("shakespeare", tmp_path)["tokens"] == {"train": 945, "val": 105}
    (tmp_path / "by hand" / "shakespeare").mkdir(parents=True)
    (tmp_path / "by hand" / "shakespeare" / "input.txt").write_bytes(text)
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", "http://127.0.0.1:9/nothing")
    assert prepare.prepare("shakespeare", tmp_path / "by hand")["tokens"]["val"] == 105


def test_ids_outside_the_vocabulary_are_caught(tmp_path):
    """An id the model has no embedding for is an error of the data loader, which names file, offset and id."""
    write_data(tmp_path / "d", b"abc" * 40, b"abc" * 40, "a test")
    ids = np.zeros(120, dtype="<u2")
    ids[57] = 300
    ids.tofile(tmp_path / "d" / "val.bin")
    (tmp_path / "d" / "meta.json").write_text('{"vocab_size": 256}', encoding="utf-8")
    _, split, val = prepare.load("d", 8, folder=tmp_path)
    assert split.batch(4, 0, 0)[0].max() < 256
    with pytest.raises(prepare.UserError, match=r"val\.bin: token 57 is the id 300.*vocab_size=256"):
        list(val.fixed(0, 4))


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    """A batch is a pure function of (seed, step) and reaches both ends of the split."""
    write_data(tmp_path / "d", bytes(range(20)), bytes(range(100)), "a test")
    _, split, val = prepare.load("d", 8, folder=tmp_path)
    np.random.seed(0)
    first = split.batch(4, 1, 2)[0]
    np.random.seed(1)
    assert (split.batch(4, 1, 2)[0] == first).all()
    assert (split.batch(4, 1, 3)[0] != first).any() and (split.batch(4, 2, 2)[0] != first).any()
    x, y = split.batch(1000, 0, 0)
    assert x.min() == 0 and y.max() == 19 and (y == x + 1).all()


def test_evaluation_windows(tmp_path):
    """Windows lie side by side, evenly over the split, the same for every batch size; 0 or too many takes them all."""
    write_data(tmp_path / "d", bytes(20), bytes(range(100)), "a test")
    _, _, val = prepare.load("d", 8, folder=tmp_path)
    for count, expected in ((0, range(0, 96, 8)), (99, range(0, 96, 8)), (3, [0, 32, 64]), (5, [0, 16, 32, 56, 72])):
        for size in (1, 3, 100):
            x, y = (np.concatenate(ids) for ids in zip(*val.fixed(count, size)))
            assert x[:, 0].tolist() == list(expected) and (y == x + 1).all() and x.shape[1] == 8
    write_data(tmp_path / "d", bytes(20), bytes(range(96)), "a test")        # the last window has no last target
    assert sum(len(x) for x, _ in prepare.load("d", 8, folder=tmp_path)[2].fixed(0, 4)) == 11


class Poison:
    """A pickle of this runs code when it is read, as any pickle may."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


def test_a_users_own_folder(tmp_path, monkeypatch):
    """Any folder with nanoGPT's .bin files is a data set; llm.c's header is read; a pickle in it never is."""
    own = tmp_path / "my own"
    own.mkdir()
    (own / "meta.pkl").write_bytes(pickle.dumps(Poison()))
    ids = np.arange(100_000, dtype="<u2") % 1000 + np.uint16(50_000)
    ids.tofile(own / "train.bin")
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)
    (own / "val.bin").write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(prepare.UserError, match="my own: no meta.json.*--vocab_size"):
        prepare.load(str(own), 8)
    monkeypatch.chdir(tmp_path)
    data, *splits = prepare.load("my own", 8, 51_000)
    assert all((split.tokens == ids).all() for split in splits) and splits[0].batch(2, 0, 0)[0].min() >= 50_000
    assert (data["vocab_size"], data["tokenizer"]) == (51_000, None)
    ids[-1] = 7
    ids.tofile(own / "train.bin")                                       # the same size, another end
    assert prepare.load("my own", 8, 51_000)[0]["train"] != data["train"]
    (own / "meta.json").write_text('{"vocab_size": 50257}', encoding="utf-8")
    assert prepare.load("my own", 8)[1].vocab_size == 50_257
    assert prepare.load("my own", 8, 50_304)[1].vocab_size == 50_304    # padded, as many do for speed
    with pytest.raises(prepare.UserError, match="--vocab_size=300: .*meta.json has 50257"):
        prepare.load("my own", 8, 300)


def says(error, words):
    """Whether an error is one line with all of these words."""
    return str(error).count("\n") == 0 and all(word in str(error) for word in words.split())


@pytest.mark.parametrize("what, words", [
    ("odd", "val.bin 201 even"),
    ("cut", "val.bin 90 100 meta.json cut"),
    ("replaced", "val.bin meta.json not"),
    ("header", "val.bin header 1224 1222 100"),
    ("npy", "val.bin NumPy"),
    ("gzip", "val.bin gzip"),
    ("uint32", "val.bin uint32 uint16"),
    ("wide uint32", "val.bin uint32 uint16"),
    ("int64", "val.bin int64 uint16"),
])
def test_a_file_that_is_not_what_it_seems(tmp_path, what, words):
    """Cut, replaced or foreign .bin files, also headerless ones of wider ids, are errors that name file and reason."""
    write_data(tmp_path / "d", bytes(range(100)), bytes(range(100)))
    path = tmp_path / "d" / "val.bin"
    ids = np.arange(100, dtype="<u2") + np.uint16(300)
    header = np.array([20240520, 1, 100] + [0] * 253, dtype="<i4").tobytes()
    wide = ids.astype("<u4") + np.arange(100, dtype="<u4") % 2 * 65536
    content = dict(odd=ids.tobytes() + b"x", cut=path.read_bytes()[:-20], replaced=ids.tobytes(), npy=io.BytesIO(),
                   header=header + ids.tobytes()[:-2], gzip=gzip.compress(ids.tobytes()) + b"x" * 200)
    np.save(content["npy"], ids)
    content |= {"npy": content["npy"].getvalue(), "uint32": ids.astype("<u4").tobytes(), "wide uint32": wide.tobytes(),
                "int64": ids.astype("<i8").tobytes()}
    path.write_bytes(content[what])
    if what not in ("cut", "replaced"):
        (tmp_path / "d" / "meta.json").unlink()
    with pytest.raises(prepare.UserError) as error:
        prepare.load("d", 8, None if what in ("cut", "replaced") else 2**20, folder=tmp_path)
    assert says(error.value, words), error.value


def test_ids_of_llama_3(tmp_path):
    """llm.c's other header announces ids of uint32, which are read as such."""
    (tmp_path / "d").mkdir()
    ids = np.arange(100, dtype="<u4") + np.uint32(127_000)
    for split in ("train", "val"):
        (tmp_path / "d" / f"{split}.bin").write_bytes(np.array([20240801, 7, 100] + [0] * 253, "<i4").tobytes()
                                                      + ids.tobytes())
    _, split, _ = prepare.load("d", 8, 128_256, folder=tmp_path)
    assert (split.windows(np.array([3]))[0] == ids[3:11]).all()


@pytest.mark.parametrize("field, value", [
    ("vocab_size", "256"), ("vocab_size", True), ("vocab_size", 0), ("tokenizer", 5), ("tokens", 7),
    ("tokens", dict(train=1)), ("sha256", []), ("ends", dict(train=1, val=2)), ("source", {})])
def test_meta_with_a_wrong_field(tmp_path, field, value):
    """A wrong type in any field of meta.json is one line that names file and field."""
    write_data(tmp_path / "d", bytes(range(100)), bytes(range(100)))
    path = tmp_path / "d" / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(meta | {field: value}), encoding="utf-8")
    with pytest.raises(prepare.UserError) as error:
        prepare.load("d", 8, folder=tmp_path)
    assert says(error.value, f"meta.json {field} expected"), error.value


def test_meta_as_editors_leave_it(tmp_path):
    """A byte-order mark in meta.json is no harm; what is no JSON object at all is one line."""
    write_data(tmp_path / "d", bytes(range(100)), bytes(range(100)))
    path = tmp_path / "d" / "meta.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert prepare.load("d", 8, folder=tmp_path)[0]["vocab_size"] == 256
    for content in (b"[1]", b"{", b"\xff\xfe{", b"[" * 100_000, b""):
        path.write_bytes(content)
        with pytest.raises(prepare.UserError) as error:
            prepare.load("d", 8, folder=tmp_path)
        assert says(error.value, "meta.json"), error.value


def test_prepare_writes_into_its_own_folder_alone(tmp_path):
    """A user's own folder, a second source of the same stem and names that lead out of data/ are refused, and nothing
    is touched; the same source may come again, changed.
    """
    data = tmp_path / "data"
    for name in ("own", "full"):
        (data / name).mkdir(parents=True)
        (data / name / ("train.bin" if name == "own" else "notes.md")).write_bytes(b"mine")
    names = ("own.txt", "full.txt", "a.txt", "a.md", "..txt", "...txt", "pystdlib.py")
    texts = {name: tmp_path / name for name in names}
    for path in texts.values():
        path.write_bytes(b"the quick brown fox")
    prepare.prepare(str(texts["a.txt"]), data)

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before = files()
    for name, words in (("own.txt", "own rename"), ("full.txt", "full rename"), ("a.md", "a.md a.txt rename"),
                        ("..txt", "rename"), ("...txt", "rename"), ("pystdlib.py", "pystdlib rename")):
        with pytest.raises(prepare.UserError) as error:
            prepare.prepare(str(texts[name]), data)
        assert says(error.value, words) and files() == before, error.value
    texts["a.txt"].write_bytes(b"too few")
    with pytest.raises(prepare.UserError, match="a.txt has 7 bytes: expected at least 10"):
        prepare.prepare(str(texts["a.txt"]), data)
    assert len(prepare.load("a", 1, folder=data)[1].tokens) == 17       # as it was
    texts["a.txt"].write_bytes(b"another text, longer")
    assert prepare.prepare(str(texts["a.txt"]), data)["tokens"] == dict(train=18, val=2)
    with prepare.only_writer(data / "a"), pytest.raises(prepare.UserError, match="another process"):
        prepare.prepare(str(texts["a.txt"]), data)


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_data_set_half_made_is_unusable(tmp_path, monkeypatch, moment):
    """Killed at the first, second ... renaming, prepare.py leaves a folder that load refuses, or the old one whole;
    running it again mends it.
    """
    path = tmp_path / "my.txt"
    path.write_bytes(b"old " * 100)
    prepare.prepare(str(path), tmp_path / "data")
    path.write_bytes(b"newer" * 100)
    replace, calls = os.replace, []

    def killed(*names):
        calls.append(names)
        if len(calls) == moment:
            raise KeyboardInterrupt
        replace(*names)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        prepare.prepare(str(path), tmp_path / "data")
    if moment == 1:
        assert prepare.load("my", 8, folder=tmp_path / "data")[1].tokens[:4].tobytes() == b"o\0l\0d\0 \0"
    else:
        with pytest.raises(prepare.UserError, match="half made.*run it again"):
            prepare.load("my", 8, folder=tmp_path / "data")
    prepare.prepare(str(path), tmp_path / "data")
    assert prepare.load("my", 8, folder=tmp_path / "data")[1].tokens[:2].tobytes() == b"n\0e\0"


def test_pystdlib_half_made_is_made_again(tmp_path, monkeypatch):
    """The default data set needs no command, so what a kill left of it is no reason to stop."""
    (tmp_path / "lib").mkdir()
    for i in range(10):
        (tmp_path / "lib" / f"m{i}.py").write_text("x = 1\n" * 5, encoding="utf-8")
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    prepare.prepare("pystdlib", tmp_path)
    meta = tmp_path / "pystdlib" / "meta.json"
    source = json.loads(meta.read_text(encoding="utf-8"))["source"]
    meta.write_text(json.dumps(dict(source=source, unfinished=True)), encoding="utf-8")
    assert len(prepare.load("pystdlib", 8, folder=tmp_path)[1].tokens) == 270


def test_preparing_needs_no_memory_for_the_file(tmp_path):
    """64 MB of text become a data set with less than 16 MB of memory, in pieces that both splits share rightly."""
    path = tmp_path / "big.txt"
    line = b"the quick brown fox jumps over the lazy dog, and so on ......\n"
    with open(path, "wb") as file:
        for _ in range(64):
            file.write(line * (2**20 // len(line)))
    tracemalloc.start()
    meta = prepare.prepare(str(path), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6 and sum(meta["tokens"].values()) == path.stat().st_size
    for split in ("train", "val"):
        assert hashlib.sha256((tmp_path / "big" / f"{split}.bin").read_bytes()).hexdigest() == meta["sha256"][split]


@pytest.mark.parametrize("content, kind", [
    ("Grüße, λ".encode() * 9, None), (b"\xef\xbb\xbf" + b"with a mark" * 9, None),
    (b"a" * (2**20 - 1) + "é".encode(), None),
    ("text".encode("utf-16") * 9, "UTF-16"), ("text".encode("utf-16-le") * 9, "UTF-16"),
    (gzip.compress(b"t" * 9), "gzip"),
    ("Grüße".encode("latin-1") * 9, "0xfc"), (bytes(range(256)), "binary"), (b"PK\x03\x04\xff" * 9, "zip")])
def test_a_file_that_is_no_text_is_a_warning(tmp_path, capsys, content, kind):
    """What is not UTF-8 is taken as bytes, with one warning that says what it seems to be."""
    (tmp_path / "my.txt").write_bytes(content)
    prepare.prepare(str(tmp_path / "my.txt"), tmp_path)
    warning = capsys.readouterr().err
    assert warning.count("warning") == (kind is not None) and (kind or "") in warning, warning


@pytest.mark.parametrize("name", ["two words.txt", "-dash.txt", "λ.txt", "new\nline.txt", "a'quote.txt"])
def test_prepare_takes_any_file_name(tmp_path, name):
    """As a command, where the terminal knows ASCII alone: any file name, and the output says where validation lies."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "prepare.py", tmp_path / "data" / "prepare.py")
    (tmp_path / name).write_bytes(b"the quick brown fox. " * 10)
    command = [sys.executable, "data/prepare.py", "--", name]
    ascii_alone = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ascii_alone)
    assert shown.returncode == 0, shown.stderr
    assert "189 training and 21 validation tokens (its last tenth)" in shown.stdout
    assert prepare.load(name.removesuffix(".txt"), 4, folder=tmp_path / "data")[0]["tokenizer"] == "bytes"


def test_several_files_are_one_line(capsys):
    """prepare.py makes one data set of one file, and says how to join several."""
    assert prepare.main(["a.txt", "b c.txt"]) == 2
    assert "join files first: cat a.txt 'b c.txt' > all.txt" in capsys.readouterr().err


def test_paths_mean_what_the_shell_means(tmp_path, monkeypatch):
    """A plain name is a data set of data/; ., .., ~, a slash and all that is no name of one are places as in the shell."""
    for folder in ("data/d", "here/d", "here/own", "home/own", "here/-x"):
        write_data(tmp_path / folder, folder.encode() * 9, folder.encode() * 9)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for name, place in (("d", "data/d"), ("./d", "here/d"), ("d/", "here/d"), ("own", "here/own"), ("-x", "here/-x"),
                        ("~/own", "home/own"), ("../data/d", "data/d"), (str(tmp_path / "here/d"), "here/d")):
        found = prepare.load(name, 2, folder=tmp_path / "data")[1].path.parent
        assert found.resolve() == (tmp_path / place).resolve(), name
    monkeypatch.chdir(tmp_path / "here" / "d")
    assert prepare.load(".", 2, folder=tmp_path / "data")[1].path.parent.resolve() == tmp_path / "here" / "d"
    with pytest.raises(prepare.UserError, match=r"--dataset=\.\.: no \.\./train.bin"):
        prepare.load("..", 2, folder=tmp_path / "data")


# ---------------------------------------------------------------------------------------------------------------------
# Training

TINY = ("--device=cpu --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 "
        "--log_interval=1 --warmup_iters=4 --eval_interval=10 --eval_iters=8 --max_new_tokens=20").split()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """An empty folder with a data set "d", and a way to run train.py in it: run(*flags) -> rows of log.csv."""
    write_data(tmp_path / "d", b"the quick brown fox. " * 200, b"the quick brown fox. " * 20, "a test")
    monkeypatch.chdir(tmp_path)

    def run(*flags, out="out", code=0):
        flags = [*TINY, "--dataset=d", f"--out_dir={out}", *flags]
        if "--eval_only" in flags:
            flags = [flag for flag in flags if not re.match("--(log_int|warmup|eval_int|max_new)", flag)]
        elif "--init_from=resume" not in flags:
            flags.append("--overwrite")
        assert train.main(flags) == code
        with open(tmp_path / out / "log.csv", newline="") as file:
            return list(csv.DictReader(file))
    handlers = {number: signal.getsignal(number) for number in train.SIGNALS}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def saved(name="last", out="out"):
    return torch.load(f"{out}/{name}.pt", weights_only=True)


def assert_same_run(out, other):
    """Both checkpoints, optimizers and all, and the log of two runs are equal bit for bit."""
    for name in ("last", "best"):
        a, b = saved(name, out), saved(name, other)
        for key in ("format", "step", "val_loss", "best_loss", "data", "config"):
            assert a[key] == b[key], (name, key)
        torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
        torch.testing.assert_close(a["optimizer_state"], b["optimizer_state"], rtol=0, atol=0)
    logs = [[row[:5] for row in csv.reader(open(f"{folder}/log.csv", newline=""))] for folder in (out, other)]
    assert logs[0] == logs[1] and len(logs[0]) > 1
    assert sorted(path.name for path in Path(other).iterdir()) == ["best.pt", "last.pt", "log.csv"]


def at_step(monkeypatch, number, action):
    """Do something at the beginning of step `number` (from 0)."""
    def training_step(net, x, y, step, *args, original=train.training_step):
        if step == number:
            action()
        return original(net, x, y, step, *args)
    monkeypatch.setattr(train, "training_step", training_step)


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_lower_the_loss(lab, capsys, variant):
    """Twenty steps of train.py lower the loss of every variant; log, checkpoint and last evaluation are there."""
    rows = lab(f"--variant={variant}", "--max_iters=20")
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert float(rows[0]["train_loss"]) == pytest.approx(math.log(256), abs=0.01)
    assert float(rows[-1]["train_loss"]) < 4.5 and float(rows[-1]["val_loss"]) < 4.5
    assert saved()["step"] == 20 and saved()["val_loss"] == float(rows[-1]["val_loss"])
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=16)
    assert Config(**saved()["config"]) == Config.variant(variant, **sizes)
    assert f"validation loss {saved()['val_loss']:.4f}" in capsys.readouterr().out


def test_axes_reach_the_model(lab):
    """Every field of the model's Config is a flag."""
    lab("--max_iters=1", "--variant=exoformer", "--mix=vg", "--granularity=headwise", "--anchor_norm=v",
        "--post_norm=qkv", "--anchor_layer=1", "--dynamic", "--rope_theta=100", "--vocab_size=260")
    config = Config(**saved()["config"])
    assert (config.mix, config.granularity, config.anchor_norm, config.post_norm, config.anchor_layer) == (
        "vg", "headwise", "v", "qkv", 1)
    assert (config.dynamic, config.rope_theta, config.vocab_size) == (True, 100.0, 260)


def test_presets():
    """A device has its preset, every preset builds its model, flags override its values; nanoGPT's sizes are kept."""
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        options, config = train.settle({}, None, torch.device(device))
        assert options.preset == name and asdict(config).items() >= {
            key: value for key, value in train.PRESETS[name].items() if key in train.MODEL_FLAGS}.items()
    for name, row in train.PRESETS.items():
        options, config = train.settle(dict(preset=name, n_embd=96, muon_lr=0.5), None, torch.device("cpu"))
        assert (config.n_embd, options.muon_lr) == (96, 0.5) and options.batch_size == row["batch_size"]
        assert config.n_layer == row["n_layer"] and replace(config, n_embd=row["n_embd"]).block_size == row["block_size"]
    sizes = itemgetter("n_layer", "n_head", "n_embd", "block_size", "dataset")
    assert sizes(train.PRESETS["shakespeare-cpu"]) == (4, 4, 128, 64, "shakespeare")
    assert sizes(train.PRESETS["shakespeare-gpu"]) == (6, 6, 384, 256, "shakespeare")


def test_one_schedule_drives_both_optimizers(lab, monkeypatch):
    """Muon and AdamW step with their own peak rate times the same factor of the schedule."""
    rates = {train.Muon: [], torch.optim.AdamW: []}
    for kind, seen in rates.items():
        def step(self, *args, seen=seen, original=kind.step):
            seen.append(self.param_groups[0]["lr"])
            return original(self, *args)
        monkeypatch.setattr(kind, "step", step)
    rows = lab("--max_iters=10", "--muon_lr=0.02", "--adamw_lr=0.004")
    factors = np.array([float(row["lr_factor"]) for row in rows])
    assert factors[0] == 0.25 and factors[-1] == pytest.approx(0.1)
    np.testing.assert_allclose(rates[train.Muon], 0.02 * factors)
    np.testing.assert_allclose(rates[torch.optim.AdamW], 0.004 * factors)


def test_a_third_group_has_its_own_rate(lab, monkeypatch):
    """A learner's group of λ with a rate of its own follows the schedule from its own peak, also behind a resume."""
    def three_groups(model, options, device, original=train.make_optimizers):
        optimizers = original(model, options, device)
        lam = [p for name, p in model.named_parameters() if ".lam." in name]
        others = optimizers[1].param_groups[0]
        others["params"] = [p for p in others["params"] if all(p is not other for other in lam)]
        optimizers[1].add_param_group(dict(params=lam, lr=0.05, peak_lr=0.05))
        return optimizers
    monkeypatch.setattr(train, "make_optimizers", three_groups)
    rates = []

    def step(self, *args, original=torch.optim.AdamW.step):
        rates.append([group["lr"] for group in self.param_groups])
        return original(self, *args)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    rows = lab("--max_iters=20", "--adamw_lr=0.004", out="whole")
    factors = np.array([float(row["lr_factor"]) for row in rows])
    np.testing.assert_allclose(rates, np.outer(factors, [0.004, 0.05]))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 13, lambda: 1 / 0)
        lab("--max_iters=20", "--adamw_lr=0.004")
    lab("--init_from=resume", "--max_iters=20")
    assert_same_run("whole", "out")


def test_head_and_embedding_can_be_tied(lab, monkeypatch):
    """One line ties them: the table counts once, its products are still done, it has one optimizer, and it trains,
    resumes and samples.
    """
    class Tied(ExoFormer):
        def __init__(self, config):
            super().__init__(config)
            self.W_head.weight = self.embed.weight
    config = CASES["exoformer"]
    free, tied = ExoFormer(config), Tied(config)
    outer = config.vocab_size * config.n_embd
    assert tied.num_params() == (free.num_params()[0] - outer, free.num_params()[1])
    assert tied.flops_per_token() == free.flops_per_token()
    muon, adamw = train.split_parameters(tied)
    assert sum(p is tied.embed.weight for p in adamw) == 1 and not any(p is tied.embed.weight for p in muon)
    monkeypatch.setattr(train, "ExoFormer", Tied)
    rows = lab("--max_iters=20")
    assert float(rows[-1]["val_loss"]) < 4.5
    lab("--init_from=resume", "--max_iters=21")
    model = saved()["model"]
    assert torch.equal(model["W_head.weight"], model["embed.weight"])
    assert train.main("--sample=x --device=cpu --max_new_tokens=3".split()) == 0


def test_dropout_acts_in_training_alone(lab, monkeypatch, capsys):
    """A learner who adds dropout has it in every step, and neither in evaluations nor in samples."""
    class Dropping(ExoFormer):
        def __init__(self, config):
            super().__init__(config)
            for block in self.blocks:
                block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(0.5))
    modes = []

    def training_step(net, *args, original=train.training_step):
        modes.append(net.training)
        return original(net, *args)
    monkeypatch.setattr(train, "ExoFormer", Dropping)
    monkeypatch.setattr(train, "training_step", training_step)
    often, once = ([row["train_loss"] for row in lab("--max_iters=12", f"--eval_interval={k}")] for k in (1, 1000))
    assert often == once and all(modes)
    capsys.readouterr()
    assert train.main(["--init_from=resume", "--eval_only", "--device=cpu"]) == 0
    assert f"validation loss {saved()['val_loss']:.4f}" in capsys.readouterr().out
    samples = []
    for _ in range(2):
        train.main("--sample=fox --device=cpu --temperature=0 --max_new_tokens=50".split())
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1] and len(samples[0]) > 50


def test_evaluation_does_not_touch_training(lab):
    """The losses are the same, bit for bit, however often validation runs."""
    often, once = ([row["train_loss"] for row in lab("--max_iters=12", f"--eval_interval={k}")] for k in (1, 1000))
    assert often == once


def test_accumulation_equals_a_larger_batch(lab, monkeypatch):
    """8 micro-batches of 1 are one batch of 8: the same gradients to 1e-6 and the same logged loss."""
    gradients = []

    def step(self, original=train.Muon.step):
        gradients.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        original(self)
    monkeypatch.setattr(train.Muon, "step", step)
    accumulated, whole = (lab("--max_iters=3", f"--batch_size={b}", f"--gradient_accumulation_steps={8 // b}")
                          for b in (1, 8))
    for a, b in zip(gradients[:3], gradients[3:]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert max(g.abs().max() for g in gradients[2]) > 1e-3
    for a, b in zip(accumulated, whole):
        assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), rel=1e-6)


def test_speed_leaves_out_all_but_the_steps(lab, monkeypatch):
    """By a clock that only reading (one second) and evaluating, saving and compiling (an hour) move, a step has 1 s."""
    now = [0]

    def tick():
        now[0] += 1
        return now[0]

    def an_hour(function):
        def slow(*args):
            now[0] += 3600
            return function(*args)
        return slow
    monkeypatch.setattr(train.time, "perf_counter", tick)
    monkeypatch.setattr(train, "compiled", an_hour(lambda model, *_: model))
    for name in ("evaluate", "save"):
        monkeypatch.setattr(train, name, an_hour(getattr(train, name)))
    rows = lab("--max_iters=6", "--eval_interval=2", "--compile", "--gradient_accumulation_steps=3")
    assert [float(row["seconds"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["tokens_per_second"] for row in rows} == {str(3 * 4 * 16)}


def test_mfu(lab, monkeypatch, capsys):
    """MFU is model FLOPs by the peak of the GPU's name, and n/a on a CPU, an unknown GPU and in float32."""
    cuda = torch.device("cuda", 0)
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40G"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert math.isnan(train.peak_flops(cuda, "bfloat16"))
    for name, peak in (("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 NVL", 835e12),
                       ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12),
                       ("NVIDIA L40", 181e12),
                       ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA L4", 121e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert train.peak_flops(cuda, "bfloat16") == peak and math.isnan(train.peak_flops(cuda, "float32"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus")
    assert math.isnan(train.peak_flops(cuda, "bfloat16"))
    lab("--max_iters=2")
    assert "MFU n/a" in capsys.readouterr().out
    monkeypatch.setattr(train.time, "perf_counter", itertools.count().__next__)         # a step takes a second
    config = Config.variant("exoformer-dynamic", n_layer=2, n_head=2, n_embd=32, block_size=16)
    monkeypatch.setattr(train, "peak_flops", lambda *_: ExoFormer(config).flops_per_token() * 4 * 16 / 0.37)
    lab("--max_iters=2")
    assert "64 tokens/s, MFU 37%" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is lost

@pytest.mark.parametrize("step, number", [(0, 2), (2, 15), (9, 2), (13, 15), (16, 2), (18, 15)])
def test_resume_after_a_signal_is_exact(lab, monkeypatch, capsys, step, number):
    """SIGINT (2) and SIGTERM (15) finish the step, save, print the command that resumes and exit 130 / 143; that run
    ends as the unbroken one, bit for bit: in warm-up, at an evaluation, at the start of decay, in the last step but 1.
    """
    lab("--max_iters=20", "--eval_interval=5", out="whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, step, lambda: signal.raise_signal(number))
        lab("--max_iters=20", "--eval_interval=5")
    assert end.value.code == 128 + number and saved()["step"] == step + 1
    command = shlex.split(capsys.readouterr().out.split("resume with: ")[1])
    assert command[0] == sys.executable and os.path.isabs(command[1])   # this interpreter
    here = Path.cwd()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")                               # from any folder
    assert train.main([*command[2:], "--device=cpu"]) == 0
    monkeypatch.chdir(here)
    assert_same_run("whole", "out")


def test_resume_after_a_crash_is_exact(lab, monkeypatch):
    """A run that died three steps behind its checkpoint goes on from there and ends as the unbroken one."""
    lab("--max_iters=20", out="whole")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 13, lambda: 1 / 0)
        lab("--max_iters=20")
    with open("out/log.csv", "a") as log:
        log.write("1")                                                  # of "14,2.5 ...": torn by the kill
    lab("--max_iters=20", "--init_from=resume")
    assert_same_run("whole", "out")


def test_signal_handlers_are_restored(lab, monkeypatch):
    """train.py's handlers stand while it trains and up to the first signal; behind that, and on every way out (the
    end, a user's error, a crash, evaluating alone), signals do what they did before: as a script, end the process.
    """
    mine = [signal.SIG_DFL, lambda *_: None, lambda *_: None][:len(train.SIGNALS)]
    for number, handler in zip(train.SIGNALS, mine):
        signal.signal(number, handler)
    during = []

    def handlers():
        return [signal.getsignal(number) for number in train.SIGNALS]

    def spy(*_):
        during.append(handlers())
    monkeypatch.setattr(train, "save", spy)
    lab("--max_iters=2", "--eval_interval=1", "--vocab_size=300", code=2)       # no best.pt for a sample
    assert len(during) == 4 and not any(handler in mine for handler in sum(during, []))
    assert handlers() == mine
    during.clear()
    for number in train.SIGNALS:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            at_step(patch, 0, lambda number=number: signal.raise_signal(number))
            lab("--max_iters=2")
        assert during and all(found == mine for found in during) and handlers() == mine
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 1, lambda: 1 / 0)
        lab("--max_iters=2")
    assert handlers() == mine
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: train.require_finite(dict(loss=math.nan), 1, train.Options()))
        lab("--max_iters=2", code=2)
    assert handlers() == mine
    lab("--eval_only")
    assert handlers() == mine


def test_a_finished_run_is_not_overwritten(lab, capsys):
    """Starting again from scratch where a run's files lie is refused before anything is touched, naming three ways on;
    --overwrite deletes that run, so that a kill before the first save leaves nothing to resume by mistake.
    """
    lab("--max_iters=2")
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    start = [*TINY, "--dataset=d", "--out_dir=out"]
    for gone in (None, "last.pt"):                                      # best.pt alone is worth keeping as well
        if gone:
            before.pop(Path("out", gone))
            Path("out", gone).unlink()
        capsys.readouterr()
        assert train.main([*start, "--max_iters=1"]) == 2
        assert says(capsys.readouterr().err.strip(), "--out_dir=out --init_from=resume another --overwrite")
        assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 1, lambda: 1 / 0)
        train.main([*start, "--max_iters=3", "--overwrite"])
    assert [path.name for path in Path("out").iterdir()] == ["log.csv"]
    assert train.main([*start, "--max_iters=1"]) == 0                   # a log alone is no run
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    capsys.readouterr()
    assert train.main([*start, "--init_from=out/best.pt", "--overwrite"][8:]) == 2      # it would delete its own weights
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    Path("out/log.csv").write_bytes(b"my notes")
    assert train.main([*start, "--overwrite"]) == 2                     # refused before the checkpoints are deleted
    assert Path("out/last.pt").exists() and Path("out/best.pt").exists()


def test_only_a_runs_own_files_are_removed(lab, capsys):
    """Other files in out_dir stay, *.tmp too; a log.csv that is not a run's is refused."""
    Path("out").mkdir()
    for name in ("mine.tmp", "notes.tmp", "last.pt.old"):
        Path("out", name).write_bytes(b"mine")
    lab("--max_iters=1")
    lab("--max_iters=2", "--init_from=resume")
    assert all(Path("out", name).read_bytes() == b"mine" for name in ("mine.tmp", "notes.tmp", "last.pt.old"))
    Path("other").mkdir()
    Path("other/log.csv").write_bytes(b"day,weight\n1,70\n")
    capsys.readouterr()
    assert train.main([*TINY, "--dataset=d", "--out_dir=other"]) == 2
    assert "other/log.csv" in capsys.readouterr().err
    assert Path("other/log.csv").read_bytes() == b"day,weight\n1,70\n"


def test_two_runs_cannot_share_a_folder(lab, capsys):
    """While a run is at work in out_dir, a second one there is refused."""
    refused = []
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 0, lambda: refused or refused.append(train.main([*TINY, "--dataset=d", "--max_iters=1"])))
        assert train.main([*TINY, "--dataset=d", "--max_iters=2"]) == 0
    assert refused == [2] and "another process is writing into out" in capsys.readouterr().err
    assert saved()["step"] == 2


class Broken(io.StringIO):
    """A pipe that nobody reads any more, or a stream that cannot spell a character."""
    error = BrokenPipeError("nobody reads")

    def write(self, _):
        raise self.error
    flush = close = lambda *_: None


@pytest.mark.parametrize("error", [BrokenPipeError("a pipe"), OSError(5, "a terminal"), OSError(28, "a disk"),
                                   UnicodeEncodeError("ascii", "λ", 0, 1, "a character"), ValueError("closed")])
def test_output_never_costs_a_step(lab, monkeypatch, error):
    """With stdout and stderr broken, a signal is answered as ever: the step is done, saved and resumed, bit for bit."""
    lab("--max_iters=20", out="whole")
    broken = Broken()
    broken.error = error
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "stdout", broken)
        patch.setattr(sys, "stderr", broken)
        at_step(patch, 13, lambda: signal.raise_signal(signal.SIGHUP))
        train.main([*TINY, "--dataset=d", "--max_iters=20"])
    assert end.value.code == 128 + signal.SIGHUP and saved()["step"] == 14
    lab("--max_iters=20", "--init_from=resume")
    assert_same_run("whole", "out")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_an_ignored_signal_stays_ignored(lab, monkeypatch):
    """Under nohup a closed terminal does not stop the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGHUP))
        lab("--max_iters=3")
        assert saved()["step"] == 3 and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_log_that_cannot_be_written_is_a_warning(lab, monkeypatch, capsys):
    """A full disk or a spreadsheet that holds log.csv costs rows, never steps."""
    def lock():
        Path("out/log.csv").unlink()
        Path("out/log.csv").mkdir()                                     # as root, a folder is what refuses to open
    at_step(monkeypatch, 5, lock)
    assert train.main([*TINY, "--dataset=d", "--max_iters=8"]) == 0
    assert capsys.readouterr().err.count("is not in out/log.csv") == 3 and saved()["step"] == 8


def test_a_locked_checkpoint_is_a_warning(lab, monkeypatch, capsys):
    """As under Windows' virus scanners: renaming is tried again, then the run goes on without that save; a last save
    that fails is an error. What a lock or kill between last.pt and best.pt left undone, resuming makes up for.
    """
    lab("--max_iters=20", "--eval_interval=5", out="whole")
    waits, locked = [], {"out/best.pt": 99}

    def replace(old, new, original=os.replace):
        name = str(new).replace(os.sep, "/")
        if locked.get(name, 0) > 0:
            locked[name] -= 1
            raise PermissionError(f"{name} is in use")
        original(old, new)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(prepare.time, "sleep", waits.append)
        at_step(patch, 17, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main([*TINY, "--dataset=d", "--eval_interval=5", "--max_iters=20"])
        assert not Path("out/best.pt").exists() and saved()["step"] == 15
        assert capsys.readouterr().err.count("warning: out/best.pt is not saved") == 3 and 2 < sum(waits[:4]) < 10
    lab("--max_iters=20", "--init_from=resume")
    assert_same_run("whole", "out")
    with monkeypatch.context() as patch:
        locked = {"out/last.pt": 2}
        patch.setattr(os, "replace", replace)
        patch.setattr(prepare.time, "sleep", waits.append)
        assert train.main(["--init_from=resume", "--max_iters=21", "--device=cpu"]) == 0     # the third try
        locked["out/last.pt"] = 99
        assert train.main(["--init_from=resume", "--max_iters=22", "--device=cpu"]) == 2
    assert saved()["step"] == 21


def test_a_best_that_could_not_be_saved_is_made_up_for(lab, monkeypatch):
    """Where best.pt was locked, the next loss that is lower than best.pt's own is saved."""
    losses, locked = {2: 3.0, 4: 1.0, 6: 2.0}, {4}
    steps = iter(losses)

    def save(path, checkpoint, original=train.save):
        if path.name == "best.pt" and checkpoint["step"] in locked:
            raise prepare.UserError("in use") from PermissionError()
        original(path, checkpoint)
    monkeypatch.setattr(train, "evaluate", lambda *_: losses[next(steps)])
    monkeypatch.setattr(train, "save", save)
    lab("--max_iters=6", "--eval_interval=2")
    assert (saved("best")["step"], saved("best")["val_loss"]) == (6, 2.0)


def test_a_kill_between_the_checkpoints_loses_no_best(lab, monkeypatch):
    """last.pt is saved first; a run killed before best.pt is, resumes with the right best.pt."""
    losses = {2: 3.0, 4: 2.0, 6: 2.5}
    names = []

    def save(path, checkpoint, original=train.save):
        names.append(path.name)
        if checkpoint["step"] == 4 and path.name == "best.pt":
            raise ZeroDivisionError
        original(path, checkpoint)
    steps = iter((2, 4, 6))
    monkeypatch.setattr(train, "evaluate", lambda *_: losses[next(steps)])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "save", save)
        lab("--max_iters=6", "--eval_interval=2")
    assert names == ["last.pt", "best.pt"] * 2 and saved("best")["step"] == 2
    lab("--max_iters=6", "--eval_interval=2", "--init_from=resume")
    assert (saved("best")["step"], saved("best")["val_loss"], saved()["step"]) == (4, 2.0, 6)


def test_a_log_that_was_opened_elsewhere(lab, capsys):
    """A spreadsheet's mark and line ends are no harm; foreign rows are dropped with one warning; another header stops."""
    lab("--max_iters=20", out="whole")
    lab("--max_iters=10")
    path = Path("out/log.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[5:5] = ["a note of mine", "3,5", "4;5;6;7;8;9;1"]
    path.write_bytes("\r\n".join(["\ufeff" + lines[0], *lines[1:], ""]).encode())
    capsys.readouterr()
    lab("--max_iters=20", "--init_from=resume")
    assert capsys.readouterr().err.count("dropped 3 rows that are not a run's: 'a note of mine'") == 1
    assert [row[:1] for row in csv.reader(path.open())] == [["step"], *([str(n)] for n in range(1, 21))]
    path.write_bytes(b"\xff\xfe" + path.read_bytes())
    assert train.main(["--init_from=resume", "--max_iters=21", "--device=cpu"]) == 2
    assert "log.csv does not begin with step," in capsys.readouterr().err


@pytest.mark.parametrize("part", train.PARTS)
def test_a_checkpoint_without_a_part_is_one_line(lab, capsys, part):
    """Whatever part of a checkpoint is missing or of another type, one line names file and part."""
    lab("--max_iters=1")
    checkpoint = saved()
    for content in ({key: value for key, value in checkpoint.items() if key != part}, checkpoint | {part: "x"}):
        torch.save(content, "out/last.pt")
        capsys.readouterr()
        assert train.main(["--init_from=resume", "--max_iters=2", "--device=cpu"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "out/last.pt" in error and part in error, error


def test_a_checkpoint_of_other_versions(lab, capsys):
    """A flag that a checkpoint does not know has its default; one or a part that train.py does not know is a warning; a
    state of the optimizers that does not fit is one line.
    """
    lab("--max_iters=1")
    checkpoint = saved()
    del checkpoint["options"]["grad_clip"], checkpoint["config"]["norm_eps"]
    checkpoint["options"]["colour"] = "red"
    torch.save(checkpoint | dict(wandb_id="x"), "out/last.pt")
    capsys.readouterr()
    assert train.main(["--init_from=resume", "--max_iters=2", "--device=cpu"]) == 0
    assert re.findall(r"has '(\w+)', which train.py does not know", capsys.readouterr().err) == ["wandb_id", "colour"]
    assert saved()["options"]["grad_clip"] == 1.0 and "colour" not in saved()["options"]
    state = saved()["optimizer_state"]
    name = "embed.weight"
    for broken in ({key: value for key, value in state.items() if key != name}, state | {"other": {}},
                   state | {name: {"exp_avg": torch.zeros(3)}}):
        torch.save(saved() | dict(optimizer_state=broken), "out/broken.pt")
        shutil.copy("out/last.pt", "keep.pt")
        shutil.move("out/broken.pt", "out/last.pt")
        assert train.main(["--init_from=resume", "--max_iters=3", "--device=cpu"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "optimizer_state" in error and ("other" in error or name in error), error
        shutil.move("keep.pt", "out/last.pt")


def test_a_changed_exoformer_is_not_called_damage(lab, monkeypatch, capsys):
    """After a learner's change, resume and --sample name what is missing or extra; a mistake in it shows where it is."""
    lab("--max_iters=1")

    class Changed(ExoFormer):
        def __init__(self, config):
            super().__init__(config)
            del self.norm.weight
            self.bias = torch.nn.Parameter(torch.zeros(3))
    command = ["--init_from=resume", "--max_iters=2", "--device=cpu"]
    for flags in (command, ["--sample=x", "--device=cpu"]):
        with monkeypatch.context() as patch:
            patch.setattr(train, "ExoFormer", Changed)
            capsys.readouterr()
            assert train.main(flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "damaged" not in error, error
        assert all(word in error for word in ("another exoformer.py", "lacks bias", "has norm.weight", "train again")), error
    for broken in (NameError, ValueError, TypeError):
        with monkeypatch.context() as patch, pytest.raises(broken):
            def typo(config, broken=broken):
                raise broken("a typo")
            patch.setattr(train, "ExoFormer", typo)
            train.main(command)
        with monkeypatch.context() as patch, pytest.raises(broken):
            patch.setattr(train, "ExoFormer", typo)
            train.main([*TINY, "--dataset=d", "--out_dir=new"])


def test_extending_a_run_says_that_rates_rise(lab, capsys):
    """A finished run that is extended leaves its decay, which is said; one that is not is silent."""
    lab("--max_iters=10")
    capsys.readouterr()
    lab("--max_iters=30", "--init_from=resume")
    assert "the rates rise again, from 0.10 to 1.00 of their peaks" in capsys.readouterr().out


def test_fine_tuning(lab, capsys):
    """--init_from=FILE begins a new run with that model's weights alone, on other data, with a longer context if asked;
    other flags of the model are refused.
    """
    lab("--max_iters=5", "--variant=exoformer", out="first")
    write_data(Path("e"), b"a lazy dog sleeps. " * 200, b"a lazy dog sleeps. " * 20)
    flags = [flag for flag in TINY if not re.match("--(n_|block)", flag)] + ["--dataset=e", "--init_from=first/best.pt"]
    capsys.readouterr()
    weights = []
    with pytest.MonkeyPatch.context() as patch:
        def first(net, *args, original=train.training_step):
            weights.append(copy.deepcopy(net.state_dict()))
            return original(net, *args)
        patch.setattr(train, "training_step", first)
        assert train.main([*flags, "--max_iters=3", "--block_size=24"]) == 0
    assert "trained on 16 tokens of context" in capsys.readouterr().err
    torch.testing.assert_close(weights[0], saved("best", "first")["model"], rtol=0, atol=0)
    assert (saved()["step"], saved()["config"]["block_size"], saved()["options"]["variant"]) == (3, 24, "exoformer")
    assert saved()["data"]["name"] == "e"
    assert train.main([*flags, "--max_iters=3"]) == 2                   # the folder has a run
    for other in ("--n_layer=3", "--mix=q"):
        assert train.main([*flags, "--out_dir=new", other]) == 2
    meta = json.loads(Path("e/meta.json").read_text(encoding="utf-8"))
    Path("e/meta.json").write_text(json.dumps(meta | dict(vocab_size=300)), encoding="utf-8")
    capsys.readouterr()
    assert train.main([*flags, "--out_dir=new"]) == 2
    assert says(capsys.readouterr().err.strip(), "256 e/meta.json 300")


def test_samples_as_users_ask_for_them(lab, capsys):
    """A prompt from a file, one that begins with @, several samples, a stop text, a longer context, no ids that no byte
    spells although the vocabulary has them.
    """
    lab("--max_iters=3", "--vocab_size=300")
    capsys.readouterr()
    Path("prompt.txt").write_bytes("thé quick".encode())
    base = ["--device=cpu", "--max_new_tokens=40"]

    def out(*flags):
        assert train.main([*base, *flags]) == 0
        return capsys.readouterr().out
    assert out("--sample=@prompt.txt").startswith("thé quick") and out("--sample=@@fox").startswith("@fox")
    several = out("--sample=x", "--num_samples=3", "--temperature=1000").split("-" * 20)
    assert len(several) == 3 and len(set(several)) == 3
    whole = out("--sample=the ", "--temperature=0").removesuffix("\n")
    stop = whole[10:12]
    assert out("--sample=the ", "--temperature=0", f"--stop={stop}") == whole[:whole.index(stop, 4) + 2] + "\n"
    assert len(out("--sample=x", "--block_size=64")) > 10
    assert out("--sample=the ", "--temperature=1e-45") == whole + "\n" == out("--sample=the ", "--temperature=1e-300")


def test_a_sample_that_nobody_reads_on_ends(lab, monkeypatch, capsys):
    """`--sample ... | head` ends without a complaint."""
    lab("--max_iters=1")
    monkeypatch.setattr(sys, "stdout", Broken())
    capsys.readouterr()
    assert train.main("--sample=x --device=cpu".split()) == 0 and not capsys.readouterr().err


def test_perplexity_overflows_to_inf():
    assert train.report(710.0) == "validation loss 710.0000 nats per token, perplexity inf"
    assert train.report(math.log(2)).endswith("perplexity 2.000")


def test_too_large_a_size_is_one_line(lab, monkeypatch, capsys):
    """Memory that runs out, the CPU's or a GPU's, is one line that names the flags to lower."""
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA"), MemoryError()):
        with monkeypatch.context() as patch:
            def fails(*_, error=error):
                raise error
            patch.setattr(train, "training_step", fails)
            assert train.main([*TINY, "--dataset=d", "--max_iters=1"]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert all(word in last for word in ("memory", "--batch_size", "--block_size", "--n_embd", "--n_layer")), last
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="another"):
        patch.setattr(train, "training_step", lambda *_: exec("raise RuntimeError('another')"))
        train.main([*TINY, "--dataset=d", "--max_iters=1"])


def test_help_shows_every_default(capsys, monkeypatch):
    """--help has the default of each flag, the model's too."""
    monkeypatch.setenv("COLUMNS", "1000")                               # no line ends within a name
    with pytest.raises(SystemExit):
        train.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, f in (train.OPTIONS | train.MODEL_FLAGS).items():
        kind = re.escape("[true|false]" if f.type is bool else f.type.__name__)
        about = re.search(rf"--{name} {kind} (.*?)(?= --\w+ (?:str|int|float|\[true)|$)", shown)
        assert about and (f.default is None or f"default: {f.default}" in about[1]), (name, about)


def test_train_is_a_function(lab):
    """In a notebook's thread and in a loop over seeds, train.train({...}) trains like the command line, and returns
    the last validation loss.
    """
    lab("--max_iters=3", "--seed=2", out="script")
    given = train.parse([*TINY, "--dataset=d", "--max_iters=3"])
    losses = {}

    def over_seeds():
        for seed in (1, 2):
            losses[seed] = train.train(given | dict(seed=seed, out_dir=f"out{seed}"))
    thread = threading.Thread(target=over_seeds)
    thread.start()
    thread.join()
    assert losses[2] == saved(out="script")["val_loss"] and losses[1] != losses[2]
    assert_same_run("script", "out2")


def fork(action):
    """The pid of a child process that does something, silently, and exits 0."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        tqdm.set_lock(threading.RLock())        # its own: a child killed with the inherited one would lock its parent
        action()
        os._exit(0)
    return pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_lose_nothing(lab):
    """kill -9 at twenty random moments, with a save after every step: both files are always whole, and the run that
    goes on from them each time ends as the unbroken one, bit for bit.
    """
    flags = [*TINY, "--dataset=d", "--max_iters=60", "--eval_interval=1"]
    assert train.main([*flags, "--out_dir=whole"]) == 0
    seconds = saved(out="whole")["seconds"] * 2 / 20                    # of steps; saving takes about as long again
    waits, kills = np.random.default_rng(0), 0
    while kills < 20:
        resume = ["--init_from=resume"] if Path("out/last.pt").exists() else []
        pid = fork(lambda: train.main([*flags, "--out_dir=out", *resume]))
        time.sleep(waits.uniform(0, 2 * seconds) + 0.02)
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] == 0:                                  # too late, it was through: begin again
            shutil.rmtree("out")
            continue
        kills += 1
        for name in ("best", "last"):
            if Path(f"out/{name}.pt").exists():
                train.load_checkpoint(Path(f"out/{name}.pt"))
    resume = ["--init_from=resume"] if Path("out/last.pt").exists() else []
    assert train.main([*flags, "--out_dir=out", *resume]) == 0
    assert_same_run("whole", "out")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and a limit on file sizes")
def test_a_full_disk_leaves_the_last_checkpoint(lab):
    """Where a file cannot grow, as on a full disk, saving fails with exit code 2 and the files stay as they were."""
    import resource
    lab("--max_iters=2")
    before = {path.name: path.read_bytes() for path in Path("out").glob("*.pt")}

    def fails():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        os._exit(train.main([*TINY, "--dataset=d", "--out_dir=out", "--init_from=resume", "--max_iters=4"]))
    assert os.waitstatus_to_exitcode(os.waitpid(fork(fails), 0)[1]) == 2
    assert {path.name: path.read_bytes() for path in Path("out").iterdir() if path.name != "log.csv"} == before


def test_replacing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    """A write that fails half-way, in fsync or in the renaming leaves the old file and no other; fsync comes first."""
    path, calls = tmp_path / "a.pt", []
    path.write_bytes(b"old")
    for name in ("fsync", "replace", None):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            def fails(*_):
                raise OSError("disk full")
            if name:
                patch.setattr(os, name, fails)
            with prepare.replacing(path) as file:
                file.write(b"half")
                if not name:
                    fails()
        assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *args, call=getattr(os, name): calls.append(call.__name__) or call(*args))
    with prepare.replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and calls == ["fsync", "replace"] and len(list(tmp_path.iterdir())) == 1


def test_last_and_best(lab, monkeypatch):
    """last.pt is the newest and best.pt the one of lowest validation loss, over a resume too, however short the run."""
    losses = iter([3.0, 2.0, 2.5, 2.2, 1.9])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    lab("--max_iters=3", "--eval_interval=1")
    steps = [tuple(itemgetter("step", "val_loss", "best_loss")(saved(name)) for name in ("last", "best"))]
    for more in (4, 5):
        Path("out/best.pt.tmp").write_bytes(b"half a checkpoint")       # what a kill leaves
        lab("--init_from=resume", f"--max_iters={more}")
        steps.append(tuple(itemgetter("step", "val_loss", "best_loss")(saved(name)) for name in ("last", "best")))
        assert not Path("out/best.pt.tmp").exists()
    assert steps == [((3, 2.5, 2.0), (2, 2.0, 2.0)), ((4, 2.2, 2.0), (2, 2.0, 2.0)), ((5, 1.9, 1.9), (5, 1.9, 1.9))]
    monkeypatch.setattr(train, "evaluate", lambda *_: 5.0)
    lab("--max_iters=1", "--eval_interval=1000")                        # another run in the same folder
    assert saved("best")["step"] == saved()["step"] == 1


def test_checkpoints_are_plain(lab):
    """A checkpoint is tensors and plain values, loads with weights_only, and says all that a run is."""
    lab("--max_iters=2")

    def plain(value):
        if type(value) is dict or type(value).__name__ == "OrderedDict":
            return all(type(key) in (str, int) and plain(v) for key, v in value.items())
        if type(value) in (list, tuple):
            return all(map(plain, value))
        return value is None or type(value) in (str, int, float, bool, torch.Tensor)
    checkpoint = saved()
    assert plain(checkpoint)
    assert (checkpoint["format"], checkpoint["step"], checkpoint["options"]["batch_size"]) == (2, 2, 4)
    meta = json.loads(Path("d/meta.json").read_text(encoding="utf-8"))
    assert checkpoint["data"] == dict(name="d", vocab_size=256, tokenizer="bytes") | meta["sha256"]
    model = ExoFormer(Config(**checkpoint["config"]))
    assert set(checkpoint["model"]) == {name for name, _ in model.named_parameters()}


def test_compiled_and_plain_runs_share_checkpoints(lab, monkeypatch):
    """--compile trains the compiled model but saves the raw one; either resumes, and samples, what the other left."""
    calls = []

    def spy(model, real=torch.compile):
        net = real(model, backend="eager")
        net.register_forward_hook(lambda *_: calls.append(1))
        return net
    monkeypatch.setattr(torch, "compile", spy)
    torch._dynamo.reset()
    lab("--max_iters=20", "--compile=false", "--eval_interval=5", out="whole")
    assert not calls
    lab("--max_iters=5", "--compile")
    assert len(calls) == 1 + 5                                          # the first call, and every step
    assert not any("_orig_mod" in name for name in saved()["model"])
    lab("--max_iters=10", "--init_from=resume", "--compile=false")
    assert len(calls) == 1 + 5
    lab("--max_iters=12", "--init_from=resume", "--compile")
    assert len(calls) == 1 + 5 + 1 + 2 and saved()["step"] == 12
    assert train.main("--sample=x --device=cpu --max_new_tokens=3".split()) == 0


def test_resume_needs_no_more_memory_than_starting(lab, monkeypatch):
    """In a step of a resumed run no more bytes of tensors are alive than in a run from scratch, to a hundredth."""
    def tensor_bytes():
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found.append(sum(storages.values()))
    found = []
    with monkeypatch.context() as patch:
        at_step(patch, 3, tensor_bytes)
        lab("--max_iters=4")
        lab("--max_iters=3", out="other")
        lab("--max_iters=4", "--init_from=resume", out="other")
    assert 100_000 < found[1] < 1.01 * found[0]


def test_resume_takes_its_options_from_the_checkpoint(lab, monkeypatch, capsys):
    """A bare --init_from=resume goes on with the checkpoint's options; what a flag changes is said, and what it cannot
    change is an error with both values; a finished run says so and how to go on.
    """
    lab("--max_iters=2", "--variant=gated", "--weight_decay=0.3", "--mix=VG", "--preset=gpu")
    resume = ["--init_from=resume", "--out_dir=out", "--device=cpu"]
    capsys.readouterr()
    groups = []

    def step(self, original=train.Muon.step):
        groups.append(self.param_groups[0] | dict(params=None))
        original(self)
    monkeypatch.setattr(train.Muon, "step", step)
    assert train.main([*resume, "--max_iters=3", "--weight_decay=0.2", "--mix=VG", "--variant=gated"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    assert sorted(lines) == ["changed since the checkpoint: max_iters from 2 to 3",
                             "changed since the checkpoint: weight_decay from 0.3 to 0.2"]
    assert saved()["step"] == 3 and len(groups) == 1 and groups[0]["weight_decay"] == 0.2
    assert groups[0]["peak_lr"] == train.PRESETS["gpu"].get("muon_lr", train.Options.muon_lr)
    assert itemgetter("variant", "batch_size", "dataset", "max_iters")(saved()["options"]) == ("gated", 4, "d", 3)
    for flag, words in (("--n_layer=5", "n_layer=5 2"), ("--variant=base", "variant=base gated"),
                        ("--mix=q", "mix=q vg"), ("--n_head=5", "n_head=5 2"), ("--preset=cpu", "preset=cpu gpu"),
                        ("--vocab_size=9", "vocab_size=9 256")):
        assert train.main([*resume, flag]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words.split()), error
    before = Path("out/last.pt").read_bytes()
    assert train.main(resume) == 0
    assert "has done its 3 steps: to extend it, resume with --max_iters=6" in capsys.readouterr().out
    assert Path("out/last.pt").read_bytes() == before


def test_resume_wants_its_data(lab, capsys):
    """The data set may have moved; another one, by content or vocabulary, is an error that names both."""
    lab("--max_iters=2")
    shutil.copytree("d", "moved")
    resume = ["--init_from=resume", "--out_dir=out", "--device=cpu", "--max_iters=4"]
    assert train.main([*resume, "--dataset=moved", "--max_iters=3"]) == 0
    write_data(Path("moved"), b"the quick brown fix. " * 200, b"the quick brown fox. " * 20, "a test")
    meta = json.loads(Path("d/meta.json").read_text(encoding="utf-8"))
    Path("d/meta.json").write_text(json.dumps(meta | dict(vocab_size=200)), encoding="utf-8")
    for name, words in (("moved", "moved train trained"), ("d", "vocab_size 200 256")):
        capsys.readouterr()
        assert train.main([*resume, f"--dataset={name}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words.split()), error


@pytest.mark.parametrize("content", ["text", "cut", "flipped", "list", "format", "weights", "poison"])
def test_a_damaged_or_foreign_checkpoint_is_one_line(lab, capsys, content):
    """A file that is no checkpoint of this trainer, cut off, changed or of another format is named in one line."""
    lab("--max_iters=1")
    path = Path("out/last.pt")
    raw, checkpoint = path.read_bytes(), saved()
    if content in ("text", "cut", "flipped"):
        path.write_bytes({"text": b"To be", "cut": raw[:-1000], "flipped": raw[:100] + b"?" * 300 + raw[400:]}[content])
    else:
        torch.save({"list": [1], "format": checkpoint | dict(format=1),
                    "weights": checkpoint | dict(model={}), "poison": Poison()}[content], path)
    capsys.readouterr()
    assert train.main(["--init_from=resume", "--max_iters=2", "--device=cpu"]) == 2
    error = capsys.readouterr().err
    kind = "was saved with another exoformer.py" if content == "weights" else "is damaged or no checkpoint of train.py"
    assert error.count("\n") == 1 and f"last.pt {kind}" in error, error


@pytest.mark.parametrize("what", ["loss", "gradient norm", "validation loss"])
def test_a_diverged_run_keeps_the_good_checkpoints(lab, monkeypatch, capsys, what):
    """A loss or norm that is not finite stops the run before the step, with all numbers, and overwrites no file."""
    lab("--max_iters=2")
    files = {path: path.read_bytes() for path in Path("out").glob("*.pt")}
    steps = []
    monkeypatch.setattr(train.Muon, "step", lambda self: steps.append(1))
    if what == "loss":
        monkeypatch.setattr(ExoFormer, "forward", lambda self, x, y: (None, self.W_head.weight.sum() * math.nan))
    elif what == "gradient norm":
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    else:
        monkeypatch.setattr(train, "evaluate", lambda *_: math.nan)
    capsys.readouterr()
    assert train.main("--init_from=resume --device=cpu --max_iters=3".split()) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert len(error) == 1 and all(word in error[0] for word in ("step 3", f"{what} ", "muon_lr", "adamw_lr")), error
    assert len(steps) == (what == "validation loss") and all(path.read_bytes() == raw for path, raw in files.items())


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, sampling, devices

def test_evaluation_is_the_mean_over_all_windows(lab, capsys):
    """The validation loss is the mean over all windows, also where the last batch is smaller; --eval_only agrees."""
    lab("--max_iters=3", "--eval_iters=7", "--batch_size=3")
    checkpoint, model = train.load_checkpoint(Path("out/last.pt"))
    _, _, val = train.load_data("d", 16)
    windows = [model(*map(torch.from_numpy, window))[1].item() for window in val.fixed(7, 1)]
    assert checkpoint["val_loss"] == pytest.approx(sum(windows) / 7, rel=1e-6)
    capsys.readouterr()
    assert train.main(["--init_from=resume", "--eval_only", "--device=cpu", "--eval_iters=7"]) == 0
    assert f"validation loss {checkpoint['val_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["exoformer-dynamic", "exoformer", "mix vg dynamic", "headwise internal", "H_1"])
def test_anchor_shares(case):
    """The share is ‖λ1 γ1 ⊙ anchor‖ / (‖λ1 γ1 ⊙ anchor‖ + ‖λ2 γ2 ⊙ own‖) as the layers use them: what is left of the
    mix without the layer's own projection, and without the anchor, shows both.
    """
    model, idx = make(CASES[case]), tokens(CASES[case])
    expected = {}
    for layer, block in enumerate(model.blocks, 1):
        def look(mixing, inputs, mixed, layer=layer):
            X, own, anchors = inputs
            nothing = {s: torch.zeros_like(c) for s, c in own.items()}
            a, b = mixing.forward(X, nothing, anchors), mixing.forward(X, own, nothing)
            expected[layer] = {s: (a[s].norm(dim=-1) / (a[s].norm(dim=-1) + b[s].norm(dim=-1))).mean().item()
                               for s in mixing.lam}
        if block.attn.mixing:
            block.attn.mixing.register_forward_hook(look)
    shares = train.anchor_shares(model, idx)
    assert list(shares) == list(expected) and len(shares) > 0
    for layer in shares:
        assert shares[layer] == pytest.approx(expected[layer], rel=1e-9)
    for block in model.blocks:
        assert block.attn.mixing is None or len(block.attn.mixing._forward_hooks) == 1      # its own is gone


def test_anchor_shares_of_a_known_case():
    """Anchors of norm √d_h with λ1 = 3 beside an own value of norm 4 √d_h with λ2 = -2 are a share of 3 / (3 + 8)."""
    config = Config.variant("exoformer", **SMALL | dict(norm_eps=0.0))
    model = randomise(ExoFormer(config)).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.fill_(1)
        for block in model.blocks:
            block.attn.W["v"].weight.copy_(4 * torch.eye(8))        # X = 1 gives own values of 4
            block.attn.mixing.lam["v"].copy_(torch.tensor([3.0, -2.0]).view(2, 1, 1))
            block.attn.W_O.weight.zero_()                           # every layer adds nothing
            block.mlp.W_down.weight.zero_()
        model.embed.weight.fill_(0.7)
    for share in train.anchor_shares(model, tokens(config)).values():
        assert share["v"] == pytest.approx(3 / 11, rel=1e-9)


def test_training_ends_with_shares_and_a_sample(lab, capsys):
    """At the end stand each layer's shares, which λ = ½ does not make a half, and a sample, if ids can be spelt."""
    lab("--max_iters=1")
    out = capsys.readouterr().out
    rows = re.findall(r"layer (\d): q (\d+)%, k (\d+)%, v (\d+)%, g (\d+)%", out)
    assert [row[0] for row in rows] == ["1", "2"] and "a sample:" in out
    assert all(80 < int(share) < 95 for row in rows for share in row[1:])       # RMS 1 beside 0.02 √n_embd = 0.11
    Path("d/meta.json").unlink()
    lab("--max_iters=1", "--vocab_size=256", "--variant=gated")
    out = capsys.readouterr().out
    assert "anchors" not in out and "a sample:" not in out
    assert train.main(["--sample=x", "--device=cpu"]) == 2
    assert "tokenizer None" in capsys.readouterr().err


def test_flags_reach_the_step(lab, monkeypatch):
    """grad_clip bounds the update's gradient, dtype turns autocast on, and only Muon decays weights."""
    optimizers = train.make_optimizers(ExoFormer(CASES["exoformer"]), train.Options(
        muon_lr=0.1, adamw_lr=0.2, weight_decay=0.3, momentum=0.7), torch.device("cpu"))
    muon, adamw = (optimizer.param_groups[0] for optimizer in optimizers)
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.1, 0.3, 0.7)
    monkeypatch.setattr(train, "native_bfloat16", lambda _: True)
    for dtype in (torch.float32, torch.bfloat16):                       # --dtype reaches Muon's products too
        options = train.Options(dtype=str(dtype)[6:])
        assert train.make_optimizers(ExoFormer(CASES["exoformer"]), options, torch.device("cpu"))[0].dtype == dtype
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"], adamw["fused"]) == (0.2, 0.0, (0.9, 0.95), True)
    norms, dtypes = [], set()
    step = train.Muon.step

    def spy(self):
        norms.append(math.sqrt(sum((p.grad**2).sum() for p in self.param_groups[0]["params"])))
        return step(self)
    monkeypatch.setattr(train.Muon, "step", spy)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: dtypes.add(output.dtype) if isinstance(module, torch.nn.Linear) else None)
    monkeypatch.setattr(train, "anchor_shares", lambda *_: {})
    lab("--max_iters=2", "--grad_clip=0.001", "--dtype=bfloat16", "--max_new_tokens=0")
    handle.remove()
    assert 0 < max(norms) <= 0.001 and dtypes == {torch.bfloat16}


def test_scripts_run_as_users_run_them(tmp_path):
    """From another folder with a space in its name: prepare.py, train.py with --key value, --help, and Ctrl-C."""
    here = tmp_path / "a folder"
    here.mkdir()
    (here / "my text.txt").write_text("the quick brown fox. " * 100, encoding="utf-8")
    (here / "data").mkdir()
    for name in ("exoformer.py", "train.py", "data/__init__.py", "data/prepare.py"):
        shutil.copy(ROOT / name, here / name)

    def run(*command):
        return subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, encoding="utf-8")
    prepared = run("a folder/data/prepare.py", "a folder/my text.txt")
    assert prepared.returncode == 0 and "1,890 training and 210 validation tokens" in prepared.stdout
    flags = [*" ".join(TINY).replace("=", " ").split(), "--dataset", "my text", "--out_dir", "o u t"]
    trained = run("a folder/train.py", *flags, "--max_iters", "1")
    assert "it/s" not in trained.stderr                                 # no progress bar in a file
    assert trained.returncode == 0 and (tmp_path / "o u t" / "last.pt").exists(), trained.stderr
    assert "--granularity" in run("a folder/train.py", "--help").stdout
    failed = run("a folder/data/prepare.py", "nothing.txt")
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "Traceback" not in failed.stderr

    long = ["--max_iters", "5000", "--eval_interval", "5000", "--overwrite"]
    process = subprocess.Popen([sys.executable, "a folder/train.py", *flags, *long], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    log = tmp_path / "o u t" / "log.csv"
    assert "parameters" in process.stdout.readline() and log.read_text(encoding="utf-8").count("\n") < 4000  # at once
    while log.read_text(encoding="utf-8").count("\n") < 5:              # it is at work
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143 and "Traceback" not in err
    command = shlex.split(out.split("resume with: ")[1])
    resumed = run(*command[1:], "--eval_only")
    assert resumed.returncode == 0 and "validation loss" in resumed.stdout, resumed.stderr


def test_compile_failure_is_a_warning(lab, monkeypatch, capsys):
    """Where torch.compile fails, which it does at the first call, one warning is printed and training goes on."""
    def broken(model):
        def call(*_):
            raise RuntimeError("no compiler\nhere")
        return call
    monkeypatch.setattr(torch, "compile", broken)
    assert len(lab("--max_iters=2", "--compile")) == 2
    shown = capsys.readouterr()
    assert "compiling" in shown.out and shown.err.count("torch.compile failed, going on without it: no compiler\n") == 1


def test_nothing_touches_cuda_on_the_cpu(lab, monkeypatch):
    """--device=cpu asks nothing about CUDA, and nothing initialises it (torch's own optimizers ask if it is there)."""
    def asked(*_):
        assert sys._getframe(1).f_globals["__name__"].startswith("torch."), "CUDA was asked for"
        return False
    for name in ("is_available", "device_count", "get_device_capability", "get_device_name", "is_bf16_supported",
                 "synchronize"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    lab("--max_iters=1", "--dtype=auto")


def test_batches_reach_a_gpu_asynchronously(tmp_path, monkeypatch):
    """For a GPU a batch is pinned and copied without waiting; on the CPU it is the array itself."""
    write_data(tmp_path / "d", bytes(range(100)), bytes(range(100)), "a test")
    _, split, _ = prepare.load("d", 8, folder=tmp_path)
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin" * self.is_contiguous()) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda _, device, non_blocking: calls.append((device.type, non_blocking)))
    options = train.Options(batch_size=3, gradient_accumulation_steps=2, seed=5)
    x, y = train.fetch(split, options, 7, torch.device("cpu"))
    assert x.shape == (6, 8) and torch.equal(y, x + 1) and not calls
    assert (x.numpy() == split.batch(6, 5, 7)[0]).all()
    train.fetch(split, options, 7, torch.device("cuda"))
    assert calls == ["pin", ("cuda", True)] * 2


def test_sample_streams_a_continuation(lab, capsys):
    """--sample prints the prompt and new text by best.pt; the same seed prints the same text."""
    lab("--max_iters=2")
    Path("out/last.pt").unlink()
    capsys.readouterr()
    texts = []
    for _ in range(2):
        assert train.main(["--sample=the qüick", "--out_dir=out", "--max_new_tokens=30", "--device=cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("the qüick") and len(texts[0]) > 15


@pytest.mark.parametrize("flags, words", [
    ("--n_layr=3", "--n_layr=3 --n_layer"),
    ("--batch_size=many", "batch_size int 'many'"),
    ("--compile=perhaps", "compile 'perhaps' true false"),
    ("--batch_size=0", "--batch_size=0 1"),
    ("--n_layer=-1", "--n_layer=-1 1"),
    ("--vocab_size=0", "--vocab_size=0 1"),
    ("--muon_lr=nan", "--muon_lr=nan 0 to 1000"),
    ("--temperature=inf", "--temperature=inf 0 to 1000"),
    ("--momentum=1", "--momentum=1 0.9999"),
    ("--decay_share=1.5", "--decay_share=1.5 0 to 1"),
    ("--seed=9223372036854775808", "--seed=9223372036854775808"),
    ("--n_layer=99999999", "--n_layer=99999999 16777216"),
    ("--batch_size=100000000", "--batch_size=100000000 --block_size GiB lower"),
    ("--learning_rate=0.1", "--learning_rate --muon_lr --adamw_lr"),
    ("--lr_decay_iters=5", "--lr_decay_iters --decay_share"),
    ("--post_norm=none", "--post_norm='none' qk, qkv, qkvg"),
    ("config/train_shakespeare.py", "config/train_shakespeare.py --name=value"),
    ("--eval_only --muon_lr=0.1", "has no effect --eval_only drop"),
    ("--overwrite --init_from=resume", "--overwrite no effect --init_from=resume"),
    ("--device=mps", "--device=mps not supported --device=cpu"),
    ("--init_from=nothing.pt", "--init_from=nothing.pt scratch resume file"),
    ("--preset=tpu", "--preset=tpu shakespeare-cpu"),
    ("--variant=exofromer", "exofromer 'exoformer'"),
    ("--n_head=5", "n_embd=32 n_head=5"),
    ("--dataset=nowhere", "nowhere prepare.py"),
    ("--block_size=500", "val 420 block_size 501"),
    ("--vocab_size=100", "--vocab_size=100 256"),
    ("--device=cuda", "--device=cuda --device=cpu"),
    ("--device=abacus", "--device=abacus cuda:N"),
    ("--out_dir=d/meta.json --max_iters=1", "--out_dir=d/meta.json another"),
    ("--dtype=float8", "--dtype=float8 bfloat16"),
    ("--init_from=gpt2", "--init_from=gpt2 resume"),
    ("--sample=x --eval_only", "--sample --eval_only one"),
    ("--init_from=resume --out_dir=empty", "empty train"),
    ("--sample=x --out_dir=empty", "empty train"),
    ("--sample=x --block_size=8 --batch_size=3", "--batch_size no effect --sample"),
    ("--sample=@none.txt", "none.txt @@"),
])
def test_user_errors_are_one_line(lab, capsys, monkeypatch, flags, words):
    """A user's mistake prints one line on stderr with the value and the remedy, exit code 2, no traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "tqdm", lambda steps, **_: tqdm(steps, disable=True))
    flags = flags.split()
    assert train.main(flags if "--sample=" in flags[0] else [*TINY, "--dataset=d", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words.split()), error


def test_precision_fits_the_hardware(monkeypatch):
    """bfloat16 by default only where it is native: compute capability 8 (is_bf16_supported() counts emulation), or
    AVX-512 with BF16 on a CPU; float32 is TF32 on such a GPU, never on an older one or on a CPU.
    """
    cuda, cpu, precision = torch.device("cuda", 0), torch.device("cpu"), []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    for capability, native in (((8, 0), True), ((9, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        assert train.native_bfloat16(cuda) == native
        assert train.pick_dtype("auto", cuda) == ("bfloat16" if native else "float32")
        assert not precision                    # TF32 came with compute capability 8 as well
    for level, flag, native in (("AVX512", True, True), ("AVX2", True, False), ("AVX512", False, False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda flag=flag: flag)
        assert train.native_bfloat16(cpu) == native
        assert train.pick_dtype("auto", cpu) == ("bfloat16" if native else "float32")
        assert train.pick_dtype("bfloat16", cpu) == "bfloat16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not precision and train.pick_dtype("float32", cuda) == "float32" and precision == ["high"]


# ---------------------------------------------------------------------------------------------------------------------
# The worked example and the README

def changed_exoformer(old, new):
    """exoformer.py as a module, with one piece of its text changed."""
    source = (ROOT / "exoformer.py").read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is not, or not once, in exoformer.py"
    module = types.ModuleType("exoformer")
    exec(compile(source.replace(old, new), "exoformer.py", "exec"), module.__dict__)
    return module


def run_worked_example(monkeypatch, *flags, broken=None):
    """worked_example.py's exit code, with exoformer.py changed by `broken` = (old, new) text."""
    if broken:
        monkeypatch.setitem(sys.modules, "exoformer", changed_exoformer(*broken))
    monkeypatch.setattr(sys, "argv", ["worked_example.py", *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "worked_example.py"), run_name="__main__")
    return end.value.code


def test_worked_example_comes_out(monkeypatch, capsys):
    """The worked example agrees with itself and with every figure of the walkthrough and of its counterfactuals, in
    one screen and a half; --verbose prints what each way gave, and anything else is one line and exit code 2.
    """
    assert run_worked_example(monkeypatch) == 0
    story = capsys.readouterr().out
    figures = ["3.536", "(0.849, 1.131)", "(0.886, 0.599)", "0.598528", "(0.709, 0.679)", "(0.5, 0.25)",
               "(0.355, 0.170)",
               "(1, −1) → (0.8, −0.6) → (0.4, −0.15)", "(2.5, 2.75)"]
    assert all(figure in story for figure in figures)
    assert story.count("\n") < 75 and max(map(len, story.splitlines())) <= 100 and "✗" not in story
    assert run_worked_example(monkeypatch, "--verbose") == 0
    proof = capsys.readouterr().out
    assert proof.count("0.886396") >= 3 and set(story.splitlines()) < set(proof.splitlines())
    assert run_worked_example(monkeypatch, "--verbos") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.source
@pytest.mark.parametrize("old, new, step", [
    ("lam1 * anchors[s], lam2 * own[s]", "lam2 * anchors[s], lam1 * own[s]", "Mix"),
    ("self.norm, project(self.W_anc, H_k, self.h)", "{}, project(self.W_anc, H_k, self.h)", "Normalise"),
    ("gamma1 * term1, gamma2 * term2", "gamma2 * term1, gamma1 * term2", "One token's reuse"),
    ("zip(gamma[0::2], gamma[1::2])", "zip(gamma[:4], gamma[4:])", "Push one γ"),
    ("mixed = normalise(self.norm, mixed)", "pass", "Attend"),
    ("torch.cat((-angle.sin(), angle.sin())", "torch.cat((angle.sin(), -angle.sin())", "Attend"),
    ("q = rope(mixed[\"q\"], cos, sin)", "q = mixed[\"q\"]", "Attend"),
    ("is_causal=True", "is_causal=False", "No looking ahead"),
    ("U = U * mixed[\"g\"].sigmoid()", "U = U * own[\"g\"].sigmoid()", "Gate"),
    ("U = U * mixed[\"g\"].sigmoid()", "U = F.silu(U)", "Gate"),
    ("self.attn(self.attn_norm(H)", "self.attn(H", "Mix"),
    ("F.gelu(self.W1(X))", "F.relu(self.W1(X))", "Push one γ"),
    ("[s for s in config.mix if s in config.anchor_norm]", "config.mix", "No norm"),
    ("H = H + O ", "H = O ", "Logits"),
])
def test_worked_example_notices_a_broken_model(monkeypatch, capsys, old, new, step):
    """Mixing, norms, γ, RoPE, mask or gate broken in exoformer.py: the example exits 1 and names the step."""
    assert run_worked_example(monkeypatch, broken=(old, new)) == 1
    assert f"DISAGREES at {step}" in capsys.readouterr().err


def test_readme_names_exist():
    """Every name that the README's map from paper to code gives exists in the file it is said to be in."""
    rows = re.findall(r"^\|.*\| `(\w+\.py)` \| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    names = [(file, name) for file, cell in rows for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 20
    for file, dotted in names:
        thing = {"exoformer.py": exoformer, "train.py": train}[file]
        model = ExoFormer(CASES["exoformer-dynamic"])
        instances = {type(module).__name__: module for module in model.modules()} | {"Config": model.config}
        for part in dotted.split("."):
            thing = getattr(instances.get(getattr(thing, "__name__", ""), thing), part)


def test_readme_presets():
    """The README's table of presets says what the presets are."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, row in train.PRESETS.items():
        p = dict(dataset=train.Options.dataset) | row
        sizes = f"{p['n_layer']}, {p['n_head']}, {p['n_embd']}, {p['block_size']}"
        batch = p["batch_size"] * p.get("gradient_accumulation_steps", 1)
        assert f"| `{name}` | {sizes} | {batch} × {p['max_iters']} | `{p['dataset']}` |" in readme


def test_ci_runs_the_readme():
    """CI's command is the README's second of two set-up commands; the first one trains."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*$", readme, re.M)
    assert ["train.py" in commands[0], "-m pytest" in commands[1], len(commands)] == [True, True, 2]
    shown = subprocess.run(["bash", ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True).stdout
    assert shlex.split(shown) == shlex.split(commands[1])


# ---------------------------------------------------------------------------------------------------------------------
# The experiments

def experiment(name):
    """A script of experiments/ as a module."""
    if str(ROOT / "experiments") not in sys.path:
        sys.path.append(str(ROOT / "experiments"))
    return importlib.import_module(name)


def test_benchmarks_run(lab, capsys):
    """The benchmarks of experiments/bench.py fill their tables; a missing data set is one line; --help says which."""
    bench = experiment("bench")
    flags = ["--quick", "--device=cpu", "--dtype=float32", "--dataset=d"]
    for what, rows in (("mixing", 6), ("generation", 3), ("rope", 3), ("shakespeare", 5)):
        assert bench.main([what, *flags]) == 0
        out = capsys.readouterr().out
        assert len(re.findall(r"^\| .*\d\.\d.* \|$", out, re.M)) == rows and not re.search(r"\bnan\b", out), out
    assert bench.main(["shakespeare", "--quick", "--device=cpu", "--dataset=nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_experiments_have_help(capsys, tmp_path):
    """Every script of experiments/ says what it takes, and runs as a file from any folder."""
    for script in ("ablations", "bench", "cost", "diagnostics", "lesson", "report"):
        with pytest.raises(SystemExit) as end:
            experiment(script).main(["--help"])
        assert end.value.code == 0 and f"python experiments/{script}.py" in capsys.readouterr().out
    command = [sys.executable, ROOT / "experiments" / "lesson.py", "--help"]        # which imports most of the others
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, encoding="utf-8")
    assert shown.returncode == 0 and "--seeds" in shown.stdout, shown.stderr


def test_grids_run_and_go_on(lab, monkeypatch, capsys):
    """A grid appends a line a run, with all that made it; what is finished is not trained again, whichever grid asks;
    a torn line is; a mistake is one line.
    """
    ablations, out = experiment("ablations"), Path("runs.jsonl")
    command = ["systems", "--seeds=1", "--quick", "--dataset=d", f"--out={out}"]
    assert ablations.main([*command, "--keep=kept"]) == 0
    text = out.read_text()
    runs = ablations.read(out)
    assert [run["row"] for run in runs.values()] == list(VARIANTS) and text.count("\n") == 7
    for run in runs.values():
        model = train.load_checkpoint(Path("kept") / f"systems, {run['row']}, seed 1.pt")[1]
        _, _, val = prepare.load("d", model.config.block_size)
        options = train.Options(eval_iters=4, batch_size=2)
        loss = train.evaluate(model, val, options, torch.device("cpu"), nullcontext())
        assert run["final"] == run["losses"]["4"] == pytest.approx(loss) and list(run["losses"]) == ["2", "4"]
        assert (run["parameters"], run["flops_per_token"]) == (model.num_params()[0], model.flops_per_token())
        assert run["tokens"] == 4 * 2 * model.config.block_size and run["config"] == asdict(model.config)
        assert run["options"]["muon_lr"] == 0.01 and run["versions"]["torch"] == torch.__version__
        assert len(run["grad_norms"]) == 2 and run["seconds"] >= 0 and run["source"] == ablations.SOURCE

    with monkeypatch.context() as patched:
        patched.setattr(ablations, "run", lambda *_: pytest.fail("trained again"))
        shared = ["granularity", "--only=exoformer, granularity elementwise", *command[1:]]
        assert ablations.main(command) == ablations.main(shared) == 0 and out.read_text() == text
    (Path("kept") / "systems, gated, seed 1.pt").unlink()                    # a checkpoint that is asked for and is not there
    assert ablations.main([*command, "--keep=kept"]) == 0
    assert (Path("kept") / "systems, gated, seed 1.pt").exists() and out.read_text() == text
    out.write_text(text[:-200])                                     # the last line is torn
    assert ablations.main(command) == 0
    again = ablations.read(out)
    assert again.keys() == runs.keys() and all(again[name]["final"] == runs[name]["final"] for name in runs)
    capsys.readouterr()
    for wrong in (["--dataset=nothing"], ["--dataset=d", "--out=text.md"], ["--dataset=d", "--only=nothing"],
                  ["--dataset=d", "--seeds=1", "--keep=kept"]):     # where checkpoints of runs of another file lie
        assert ablations.main(["systems", "--quick", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1, wrong


APPEND = "import sys; sys.path.append(sys.argv[1]); import ablations; from pathlib import Path; " \
         "[ablations.append(Path('lines'), dict(key=f'{sys.argv[2]} {i}', text='x' * 20000)) for i in range(60)]"


def test_two_processes_do_not_tear_lines(tmp_path):
    """Two processes that write to one file of runs at once leave whole lines, all of them."""
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, ROOT / "experiments", name], cwd=tmp_path) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    lines = experiment("ablations").read_lines(tmp_path / "lines")
    assert len({line["key"] for line in lines}) == len(lines) == 120


def test_grids_are_what_they_say():
    """`matched` brings all systems within 1 % of the largest by the feed-forward's width alone; in the grids of an axis
    its default is the system itself, and every other value another model; empty anchors know no token; runs that cost
    gated's FLOPs do.
    """
    ablations = experiment("ablations")

    def model(grid, row):
        flags = ablations.flags_of(grid, row, 1, quick=False)
        sizes = {name: value for name, value in flags.items() if name in train.MODEL_FLAGS}
        with ablations.widened(flags.get("width")):
            return flags, ablations.meta_model(Config.variant(flags["variant"], **sizes))
    sizes = {row: model("matched", row)[1].num_params()[0] for row in VARIANTS}
    assert model("matched", "exoformer-dynamic")[0] == model("systems", "exoformer-dynamic")[0]      # the largest
    assert min(sizes.values()) > 0.99 * max(sizes.values()), sizes
    for grid, default in (("granularity", "elementwise"), ("anchor-norm", "qkvg"), ("post-norm", "qk"), ("source", "0"),
                          ("components", "qkvg")):
        for variant in {row.split(", ")[0] for row in ablations.GRIDS[grid]}:
            rows = {row: model(grid, row)[0] for row in ablations.GRIDS[grid] if row.split(", ")[0] == variant}
            own = model("systems", variant)[0]
            assert [row for row in rows if rows[row] == own] == [row for row in rows if row.endswith(f" {default}")]
            assert len({json.dumps(flags, sort_keys=True) for flags in rows.values()}) == len(rows)
    with ablations.emptied():
        empty, idx = make(CASES["exoformer"]), tokens(CASES["exoformer"])
        anchors = experiment("diagnostics").anchors_of(empty, idx)
        assert all((value == value[:1, :1]).all() for value in anchors.values())     # the same for every token
    assert not (experiment("diagnostics").anchors_of(empty, idx)["v"] == anchors["v"]).all()
    gated, all_of = model("systems", "gated"), "exoformer-dynamic, gated's FLOPs"
    flags, dynamic = model("budget", all_of)
    cost = flags["max_iters"] * dynamic.flops_per_token() / (gated[0]["max_iters"] * gated[1].flops_per_token())
    assert cost == pytest.approx(1, abs=0.002) and flags["max_iters"] < gated[0]["max_iters"]


def test_pairs():
    """Intervals are Student's, of differences within a seed: seeds that only one side has are left out."""
    ablations = experiment("ablations")
    assert ablations.interval([-0.002, 0.0, 0.002]) == "+0.0000 ± 0.0050"       # 4.303 · 0.002 / √3 = 0.00497
    assert ablations.interval([0.01] * 8) == "+0.0100 ± 0.0000"
    assert ablations.paired({1: 5.0, 2: 7.0, 9: 0.0}, {2: 6.5, 1: 4.0, 3: 1.0}) == [1.0, 0.5]
    assert ablations.lower_in([-1.0, 1.0, -0.1]) == "2 of 3"
    for df, quantile in ablations.T_QUANTILE.items():               # Student's density between −q and q has 95 %
        t = np.linspace(-quantile, quantile, 100_001)
        scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi)
        assert np.trapezoid(scale * (1 + t**2 / df) ** (-(df + 1) / 2), t) == pytest.approx(0.95, abs=5e-5)


def test_tokens_to_the_same_loss():
    """Along the curve, by straight lines: a run that is at gated's end after half of its tokens saves a factor of two,
    and the other way about one half.
    """
    report = experiment("report")
    slow, fast = (dict(tokens=400, options=dict(max_iters=4), losses=losses, final=losses["4"])
                  for losses in ({"1": 4.0, "2": 3.0, "4": 2.0}, {"1": 3.0, "2": 2.0, "4": 1.0}))
    assert report.tokens_to_reach(slow, 2.5) == 300 and report.tokens_to_reach(slow, 3.5) == 150
    assert report.saving(fast, slow) == 2 and report.saving(slow, fast) == 0.5 and report.saving(slow, slow) == 1


def test_tables_of_known_runs(monkeypatch):
    """A change is "as there" if its interval is on the paper's side of 0, "not as there" on the other one. A grid's rows
    are of the seeds that all of them have. Each system's best rates are those of its lowest mean.
    """
    report = experiment("report")

    def by_seed(*finals):
        return {seed: dict(final=final, parameters=1) for seed, final in enumerate(finals, 1)}

    grids = dict(
        systems={"base": by_seed(2.0, 2.1, 2.2), "gated": by_seed(1.91, 2.0, 2.1),
                 "gated-resformer": by_seed(2.0, 2.1, 2.21), "exoformer": by_seed(1.7, 2.1, 2.2)},
        source={"exoformer, anchor_layer 0": by_seed(1.7, 2.1, 2.2), "exoformer, anchor_layer 1": by_seed(1.8, 2.2)},
        rates={f"{row}, {rates}": by_seed(loss, loss, 15.0 - 3 * loss)
               for row in ("gated", "exoformer", "exoformer-dynamic")
               for rates, loss in (("half Muon", 3.0), ("as elsewhere", 2.0))})
    monkeypatch.setattr(report, "of_grid", lambda grid, runs: grids.get(grid, {}))
    monkeypatch.setitem(report.GRIDS, "rates", grids["rates"])
    rows = report.paper_table({}).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["as there |", "not as there |", "not as there |"]
    assert all(f"{math.log(b / a):+.4f}" in row
               for row, (a, b) in zip(rows, [(14.79, 14.64), (14.64, 14.25), (14.13, 14.07)]))
    grids["systems"]["gated"][1]["final"] = 2.2                         # one seed disagrees
    assert report.paper_table({}).splitlines()[2].endswith("| not told apart from 0 |")

    losses, best = report.at_best_rates({})
    assert best["exoformer"] == {1: 3.0, 2: 3.0, 3: 6.0} and len(losses) == 6           # a mean of 4, not of 13 / 3
    table = report.grid_table("source", {})
    assert "| 2 | 1.9000 |" in table and "| 2 | 2.0000 |" in table and "+0.1000 ± 0.0000" in table


def test_report_is_of_the_committed_lines(capsys):
    """Tables in both READMEs and all figures are what experiments/report.py makes of experiments/results/, the code
    that trains is the code that made them, and the lessons are the README's.
    """
    report, lesson, ablations = experiment("report"), experiment("lesson"), experiment("ablations")
    assert report.main(["--check"]) == 0, capsys.readouterr().out
    assert len({run["source"] for run in ablations.read().values()}) == 1
    for line in report.lines_of("lessons"):
        assert lesson.lessons()[line["number"] - 1] == (line["title"], *line["change"])
    assert len(report.lines_of("lessons")) == len(lesson.lessons()) == 8
    for figure in (ROOT / "experiments" / "figures").glob("*.svg"):
        assert figure.stat().st_size <= 100_000
    made, text = report.tables(ablations.read()), report.TEXTS[1].read_text(encoding="utf-8")
    assert "another" in report.filled(text, made | dict(systems="another")) != text == report.filled(text, made)
    with pytest.raises(train.UserError, match="has no '<!-- end -->'"):
        report.filled(text.replace("<!-- end -->", "", 1), made)


@pytest.mark.source
@pytest.mark.parametrize("number", range(1, 9))
def test_readme_lessons(number):
    """The line that a lesson changes stands once in exoformer.py, and the changed model computes something else: the
    last lesson's only with a cache.
    """
    lesson = experiment("lesson")
    title, old, new = lesson.lessons()[number - 1]
    changed = lesson.changed_exoformer(old, new, lesson.source())
    models = []
    for module in (exoformer, changed):
        torch.manual_seed(0)                    # the same start: all that differs is the line
        models.append(module.ExoFormer(module.Config.variant("exoformer-dynamic", **SMALL)))
    for model in models:
        for name, p in model.named_parameters():
            if not p.any() and ".W2." not in name:
                torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    idx = tokens(CASES["base"])
    logits = [model(idx)[0] for model in models]
    assert (logits[0] - logits[1]).abs().max() > 1e-3 or number == 8
    if number == 8:
        assert torch.equal(*logits)
        fed = [torch.cat([model(one, cache=cache)[0] for one in idx.split(1, dim=1)], dim=1)
               for model in models for cache in [model.new_cache()]]
        assert (fed[0] - logits[0]).abs().max() < 1e-5 < 1e-3 < (fed[1] - logits[0]).abs().max()


def test_lesson_runs(lab, capsys, monkeypatch):
    """lesson.py trains before and after, in pairs, and prints the table; a mistake is one line; a line that is no longer
    there too, before anything trains.
    """
    lesson = experiment("lesson")
    assert lesson.main(["6", "--quick", "--jobs=1", "--dataset=d"]) == 0
    out = capsys.readouterr().out
    assert out.count("exoformer-dynamic") == 2 and "share" in out and "ones_like" in out
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \| ([-+.\d]+) \|", out)
    assert len(rows) == 2 and all(float(b) - float(a) == pytest.approx(float(d), abs=2e-3) for a, b, d in rows)
    monkeypatch.setattr(lesson, "source", lambda: "another file")
    assert lesson.main(["1", "--quick", "--dataset=d"]) == 2
    assert "stands 0 times in exoformer.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        lesson.main(["9"])
    assert "expected 1 to 8" in capsys.readouterr().err


def test_cost_runs(capsys, monkeypatch):
    """cost.py prints a row for each system; what it says of the K/V cache is what a cache holds."""
    cost = experiment("cost")
    model = ExoFormer(CASES["exoformer"])
    caches = model.new_cache()
    model(tokens(CASES["exoformer"], batch=1), cache=caches)
    held = sum(part.numel() * part.element_size() for cache in caches for part in (cache.k, cache.v))
    assert cost.cache_bytes(model.config, 4) == held
    assert cost.main(["--quick", "--device=cpu", "--dtype=float32"]) == 0
    out = capsys.readouterr().out
    assert all(f"| `{variant}` |" in out for variant in VARIANTS) and "GFLOP/s" in out
    assert cost.main(["--device=abacus"]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_measures_on_constructed_cases():
    """Equal tokens are similar by 1, orthogonal ones by 0, opposite pairs by −1/3; attention forced onto key 0 is 1 there,
    and uniform attention of T queries is mean(1/n); data of rank r has r components.
    """
    diagnostics = experiment("diagnostics")
    vector = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(0))
    assert diagnostics.token_similarity(vector.expand(3, 5, 6) * torch.arange(1, 6)[:, None]) == pytest.approx(1)
    assert diagnostics.token_similarity(torch.eye(5)[None]) == pytest.approx(0)
    assert diagnostics.token_similarity(torch.tensor([[[1.0], [-1], [1], [-1]]])) == pytest.approx(-1 / 3)

    q = torch.zeros(2, 4, 3, 2)
    q[..., 0], k = 100, torch.zeros(2, 4, 3, 2)
    assert diagnostics.first_token_attention(q, k) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    k[:, 0] = 1
    assert diagnostics.first_token_attention(q, k) == pytest.approx(1)

    generator = np.random.default_rng(0)
    for rank in (1, 3, 7):
        basis = np.linalg.qr(generator.normal(size=(20, rank)))[0]
        data = torch.from_numpy(generator.normal(size=(2, 200, rank)) @ basis.T + 5)
        assert diagnostics.principal_components(data) == rank
    variances = torch.tensor([98.0, 0.9, 0.6, 0.5])                 # 98.9 % in two, 99.5 % in three
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)))
    assert diagnostics.principal_components((signs * variances.sqrt())[None]) == 3


def test_layers_are_those_of_the_model(monkeypatch):
    """What diagnostics.py sees in a layer is what the model computes there: H_n, q, k, v, gates, γ."""
    diagnostics, seen = experiment("diagnostics"), []
    attend = exoformer.attend
    monkeypatch.setattr(exoformer, "attend", lambda q, k, v: seen.append((q, k, v)) or attend(q, k, v))
    for name in ("gated", "nuresformer", "exoformer-dynamic", "post norm qkvg", "base"):
        model, idx = make(CASES[name]), tokens(CASES[name])
        seen.clear()
        layers = diagnostics.layers_of(model, idx)
        assert torch.equal(model.W_head(model.norm(layers[-1]["H"])), model(idx)[0]) and len(layers) == 3
        for layer, (q, k, v) in zip(layers, seen):
            assert torch.equal(layer["q"], q) and torch.equal(layer["k"], k) and torch.equal(layer["mixed"]["v"], v)
        if model.config.dynamic:
            X = model.blocks[1].attn_norm(layers[0]["H"])
            assert torch.equal(layers[1]["gamma"]["k"][1], model.blocks[1].attn.mixing.gamma(X)["k"][1][..., 0, 0])
            shares = train.anchor_shares(model, idx)
            assert shares[2] == {s: pytest.approx(share.mean().item()) for s, share in layers[1]["share"].items()}
        assert not any(module._forward_hooks for module in model.modules())


def test_interventions(tmp_path):
    """Where λ1 = 0 already, taking the anchors away changes nothing; afterwards the model is as it was; without anchors
    a static model with λ2 = 1 is `gated` with its weights.
    """
    diagnostics = experiment("diagnostics")
    for name in ("exoformer", "exoformer-dynamic", "nuresformer"):
        model, idx = make(CASES[name]), tokens(CASES[name])
        before, weights = model(idx)[0], copy.deepcopy(model.state_dict())
        for cut in ((0,), (1,), (0, "v")):
            with diagnostics.silenced(model, *cut):
                assert (model(idx)[0] - before).abs().max() > 1e-3
                for s, lam in model.blocks[-1].attn.mixing.lam.items():
                    zero = [i for i in (0, 1) if not lam[i].any()]
                    assert zero == ([cut[0]] if s in "".join(cut[1:] or "qkvg") else [])
        assert all(torch.equal(model.state_dict()[key], weights[key]) for key in weights)
        with diagnostics.silenced(model, 0):
            cut_before = model(idx)[0]
            with diagnostics.silenced(model, 0):
                assert torch.equal(model(idx)[0], cut_before)
    model, gated = make(CASES["exoformer"]), ExoFormer(CASES["gated"]).double()
    gated.load_state_dict({key: value for key, value in model.state_dict().items() if key in gated.state_dict()})
    for block in model.blocks:
        for lam in block.attn.mixing.lam.values():
            lam.data[1] = 1
    with diagnostics.silenced(model, 0):
        assert (model(idx)[0] - gated(idx)[0]).abs().max() < 1e-12


def test_who_carries_the_token():
    """A letter changed for the anchors alone moves nothing if nobody reads them, and all there is to move if they are all
    that is read; intact on both sides moves nothing.
    """
    diagnostics = experiment("diagnostics")
    text = torch.tensor([list(b"the quick brown fox jumps over it"), list(b"and then it sleeps for a long day")])
    for name in ("exoformer", "nuresformer", "exoformer-dynamic"):
        config = Config.variant(name, vocab_size=256, block_size=40, n_layer=3, n_head=2, n_embd=8)
        model = randomise(ExoFormer(config), 0.3).double().eval()
        moved = diagnostics.who_carries(model, text)
        assert all(value > 1e-4 for value in moved.values()) and len(set(moved.values())) == 3
        with diagnostics.silenced(model, 0):
            cut = diagnostics.who_carries(model, text)
        assert cut["only in the anchors"] == 0 and cut["only in the stream"] == cut["in both"] > 0
        with diagnostics.with_anchors(model, diagnostics.anchors_of(model, text)):
            assert (model(text)[0] - model(text)[0]).abs().max() == 0
        assert torch.equal(model(text)[0], model(text)[0]) and "exogenous" not in vars(model.anchor)


def test_gradient_conflict():
    """The two gradients of layer 1's projections are told apart as by weights of their own for each of the two uses;
    with λ1 = 0 nobody else reads them.
    """
    diagnostics, model = experiment("diagnostics"), make(CASES["nuresformer"])
    idx = tokens(CASES["nuresformer"])
    x, y = idx[:, :-1], idx[:, 1:]
    found = diagnostics.gradient_conflict(model, x, y)
    assert list(found) == list("qkvg") and all(abs(cosine) < 1 for cosine in found.values())
    W, cut = model.blocks[0].attn.W["v"], copy.deepcopy(model)
    own_use = torch.zeros_like(W.weight).requires_grad_()               # added to W in one of its two uses
    anchor_use = torch.zeros_like(W.weight).requires_grad_()
    hook = W.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ own_use.T)
    internal = model.anchor.internal
    X = []
    keep = model.blocks[0].attn_norm.register_forward_hook(lambda _, inputs, output: X.append(output))
    model.anchor.internal = lambda S_1: internal(S_1 | dict(
        v=S_1["v"].detach() + (X[-1].detach() @ anchor_use.T).unflatten(-1, (2, -1))))
    gradients = torch.autograd.grad(model(x, y)[1], (own_use, anchor_use))
    hook.remove(), keep.remove()
    assert F.cosine_similarity(*(g.flatten() for g in gradients), dim=0).item() == pytest.approx(found["v"], abs=1e-9)
    with diagnostics.silenced(cut, 0):
        assert set(diagnostics.gradient_conflict(cut, x, y).values()) == {0.0}


def test_gamma_by_place():
    """Places count letters of a word, from the first byte that is none; the mean of γ at a place is that of its bytes."""
    diagnostics = experiment("diagnostics")
    assert diagnostics.places_in_words(list(b"ab cde'f\nlonger words")) == [
        None, None, 0, 1, 2, 3, 6, 1, 0, 1, 2, 3, 4, 5, 5, 0, 1, 2, 3, 4, 5]
    idx = torch.tensor([list(b" ab cd"), list(b"xx yy ")])
    gamma = torch.arange(24.0).view(2, 2, 6)
    made = diagnostics.gamma_by_place([dict(gamma=dict(v=gamma))], idx)
    first, second = made["v"][0]
    assert first[:3] == pytest.approx([(0 + 3 + 8 + 11) / 4, (1 + 4 + 9) / 3, (2 + 5 + 10) / 3], abs=1e-4)
    assert first[3:] == [None] * 4 and second[1] == pytest.approx(first[1] + 12)


def test_diagnostics_run(lab, capsys):
    """diagnostics.py writes its lines, a page that shows every character's share and γ, and figures if matplotlib is there; a
    file that is no checkpoint is one line.
    """
    diagnostics = experiment("diagnostics")
    lab("--max_iters=3", "--variant=gated", "--block_size=32", out="gated")
    lab("--max_iters=3", "--block_size=32", "--n_layer=2")
    capsys.readouterr()
    text = "The quick <brown> fox & the dog. " * 4
    Path("text.txt").write_text(text)
    files = ["gated/last.pt", "out/last.pt"]
    assert diagnostics.main([*files, "--to=seen", "--windows=4", "--text=text.txt"]) == 0
    lines = [json.loads(line) for line in Path("seen/diagnostics.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["gated", "exoformer-dynamic"]
    assert list(lines[0]["interventions"]) == ["intact"] and list(lines[1]["interventions"]) == list(diagnostics.INTERVENTIONS)
    page = Path("seen/exoformer-dynamic, seed 1337.html").read_text(encoding="utf-8")
    shown = re.search(r'<div id="text">(.*?)</div>', page, re.S)[1]
    assert html.unescape(re.sub("<.?i>", "", shown)) == text and "{{" not in page
    values = json.loads(re.search(r"const values = (.*);", page)[1])
    model = train.load_checkpoint(Path("out/last.pt"))[1].eval()
    idx = torch.tensor([list(text.encode())])
    assert len(values) == 2 * 4 * 3 and all(len(of) == len(text) for of in values.values())
    for start, seen in ((0, range(0, 32)), (16, range(32, 48)), (96, range(112, 128))):     # windows that overlap by half
        layer = diagnostics.layers_of(model, idx[:, start:start + 32])[1]
        for name, of in (("γ1", layer["gamma"]["v"][0]), ("γ2", layer["gamma"]["v"][1]), ("share", layer["share"]["v"])):
            assert [round(100 * of[0, i - start].item()) for i in seen] == [values[f"2 v {name}"][i] for i in seen]
    capsys.readouterr()
    for wrong in (["text.txt"], [*files, "--to=seen"], [*files, "--windows=-1"]):
        assert diagnostics.main(wrong) == 2 and capsys.readouterr().err.count("\n") == 1


def test_figures(lab):
    """Figures are whole SVG files, below 100 kB, whose text and axes follow the page's theme."""
    pytest.importorskip("matplotlib", reason="pip install -r experiments/requirements.txt")
    plots = experiment("plots")
    diagnostics = experiment("diagnostics")
    lab("--max_iters=2", "--variant=gated", "--block_size=32", out="gated")
    lab("--max_iters=2", "--block_size=32")
    assert diagnostics.main(["gated/last.pt", "out/last.pt", "--to=seen", "--windows=4"]) == 0
    points = {"base": {"as they are": [0.01, 0.02], "matched": [0.0, 0.01]}, "exoformer": {"as they are": [0.0, -0.01]}}
    plots.forest(points, "gated", Path("seen/differences.svg"))
    figures = sorted(path.name for path in Path("seen").glob("*.svg"))
    assert figures == ["carries.svg", "depth.svg", "differences.svg", "gamma.svg", "interventions.svg", "lambda.svg"]
    for path in Path("seen").glob("*.svg"):
        root = xml.etree.ElementTree.parse(path).getroot()
        text = path.read_text(encoding="utf-8")
        assert root.tag.endswith("svg") and text.count("<text") > 5 and path.stat().st_size < 100_000
        assert "prefers-color-scheme" in text and plots.INK not in text and "#000000" not in text
