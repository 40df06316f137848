"""
The paper's walkthrough of one value head, exact, three ways: by hand in NumPy, with the functions of exoformer.py, and
with a whole ExoFormer whose weights are set so that this is what it computes. Run it: python worked_example.py

It prints each step and stops, with exit code 1, at the first that disagrees: the three ways must agree to 1e-6 and lie
within 0.001 of the figure in the walkthrough. All in float64, with d = d_h = 2, one head, all gains 1 and ε = 0.

There are two tokens. The second stands last and asks; its value anchor is (3, 4), its own value (1, -1). The first
one's mixed value is (0, 1). All four components mix; their projections are found backwards, from the mix wanted.
"""

import math
import sys

import numpy as np
import torch

import exoformer
from exoformer import Config, ExoFormer

EMBED = np.array([[2.0, 1.0], [-1.0, 3.0]])             # H_0: independent rows, so a matrix can send them anywhere
LAM = {"q": (0.5, 0.5), "k": (0.6, 0.4), "v": (0.75, 0.25), "g": (0.9, 0.1)}
ANCHOR = {"q": [[1.0, 2.0], [3.0, -1.0]], "k": [[-2.0, 1.0], [1.0, 1.0]],       # S_anc: a row for each token
          "v": [[1.0, 1.0], [3.0, 4.0]], "g": [[0.0, 2.0], [5.0, 1.0]]}
ANCHOR = {s: np.array(rows) for s, rows in ANCHOR.items()}


def rms_norm(s):
    return s / np.sqrt(np.mean(s**2, axis=-1, keepdims=True))       # RMSNorm(s) = s / sqrt(mean(s²)), gain 1, ε = 0


def mix(s, own, lam=None, gamma=(1.0, 1.0)):
    lam1, lam2 = lam or LAM[s]
    return lam1 * gamma[0] * rms_norm(ANCHOR[s]) + lam2 * gamma[1] * own


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotate(s, position):                                            # RoPE at d_h = 2: one radian per position
    cos, sin = math.cos(position), math.sin(position)
    return np.array([s[0] * cos - s[1] * sin, s[1] * cos + s[0] * sin])


def direction(angle, length):
    return length * np.array([math.cos(angle), math.sin(angle)])


def own_projections():
    """S_n, a row for each token: what the layer must project so that the mix is what the walkthrough needs.

    After QKNorm |q| = |k| = √2, so a score q·k/√2 is √2 cos(angle between them). The query and its own key get angle 0,
    score √2; the first key must score ln 4 less, so that softmax gives 0.8 and 0.2, and it stands one radian behind.
    """
    angle = 0.4
    behind = math.acos(1 - math.log(4) / math.sqrt(2))
    wanted = {"q": np.array([direction(2.0, 0.9), direction(angle, 1.7)]),      # lengths do not matter: QKNorm
              "k": np.array([direction(angle + 1 - behind, 2.3), direction(angle, 0.6)]),
              "g": np.array([[math.log(3), 0.0], [0.0, -math.log(3)]])}         # σ: (0.75, 0.5) and (0.5, 0.25)
    own = {s: (w - LAM[s][0] * rms_norm(ANCHOR[s])) / LAM[s][1] for s, w in wanted.items()}
    return own | {"v": np.array([[-3.0, 1.0], [1.0, -1.0]])}                    # 0.75 (1, 1) + 0.25 (-3, 1) = (0, 1)


def by_hand(own):
    mixed = {s: mix(s, own[s]) for s in "qkvg"}
    q, k = ([rotate(row, position) for position, row in enumerate(rms_norm(mixed[s]))] for s in "qk")
    scores = np.array([q[1] @ k[0], q[1] @ k[1]]) / math.sqrt(2)
    weights = np.exp(scores) / np.exp(scores).sum()
    u, gate = weights @ mixed["v"], sigmoid(mixed["g"])
    gated = np.array([mixed["v"][0] * gate[0], u * gate[1]])                    # the first token sees only itself
    return {"rms": np.sqrt(np.mean(ANCHOR["v"][1]**2)), "anchor": rms_norm(ANCHOR["v"])[1], "mixed": mixed["v"][1],
            "other": mixed["v"][0], "weights": weights[::-1], "retrieved": u, "gate": gate[1], "gated": gated[1],
            "first": gated[0], "logits": rms_norm(EMBED + gated).ravel()}


def heads(rows):
    return torch.tensor(rows)[None, :, None]                                    # [T, d_h] -> [B, T, h, d_h]


def config(variant="exoformer"):
    return Config.variant(variant, vocab_size=2, block_size=2, n_layer=1, n_head=1, n_embd=2, norm_eps=0.0)


@torch.no_grad()
def by_functions(own):
    norm = exoformer.RMSNorm(2, 0.0).double()
    norm.weight.fill_(1.0)
    mixing = exoformer.Mixing(config()).double()
    for s, lam in mixing.lam.items():
        lam.copy_(torch.tensor(LAM[s]).view(2, 1, 1))
    anchors = {s: norm(heads(rows)) for s, rows in ANCHOR.items()}
    mixed = mixing(torch.tensor(EMBED)[None], {s: heads(rows) for s, rows in own.items()}, anchors)
    cos, sin = exoformer.rope_table(2, 2, 500_000.0).unbind()
    q, k = (exoformer.rope(norm(mixed[s]), cos, sin) for s in "qk")
    weights = exoformer.attend(q, k, heads(np.eye(2)))[0, 1, 0]                 # with unit vectors for values
    u = exoformer.attend(q, k, mixed["v"])
    gate = mixed["g"].sigmoid()
    gated = (u * gate)[0, :, 0]
    return {"rms": ANCHOR["v"][1, 0] / anchors["v"][0, 1, 0, 0], "anchor": anchors["v"][0, 1, 0],
            "mixed": mixed["v"][0, 1, 0], "other": mixed["v"][0, 0, 0], "weights": weights.flip(0),
            "retrieved": u[0, 1, 0], "gate": gate[0, 1, 0], "gated": gated[1], "first": gated[0],
            "logits": norm(torch.tensor(EMBED) + gated).flatten()}


@torch.no_grad()
def build(own, variant="exoformer", lam=None):
    """A whole model whose weights give these anchors and projections; W^O and the head are identities."""
    model = ExoFormer(config(variant)).double()
    attn = model.blocks[0].attn
    model.embed.weight.copy_(torch.tensor(EMBED))
    for s in "qkvg":                    # EMBED Wᵀ = S_anc, a row a token, gives Wᵀ; the layer reads RMSNorm(EMBED)
        model.anchor.proj[s].weight.copy_(torch.tensor(np.linalg.solve(EMBED, ANCHOR[s]).T))
        attn.proj[s].weight.copy_(torch.tensor(np.linalg.solve(rms_norm(EMBED), own[s]).T))
        attn.mix.lam[s].copy_(torch.tensor(lam or LAM[s]).view(2, 1, 1))
    attn.out.weight.copy_(torch.eye(2))
    model.head.weight.copy_(torch.eye(2))
    return model


@torch.no_grad()
def run(model, tokens=(0, 1)):
    """model(tokens), and what its parts gave on the way: anchors, mix, U and O, a row for each token."""
    seen, attn, attend = {}, model.blocks[0].attn, exoformer.attend
    parts = {"raw": model.anchor.proj["v"], "anchor": model.anchor, "mix": attn.mix, "out": attn.out}
    hooks = [part.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output}))
             for name, part in parts.items()]
    exoformer.attend = lambda q, k, v: seen.setdefault("u", attend(q, k, v))    # its result, on its way to the gate
    logits = model(torch.tensor([tokens]))[0][0]                                # [T, V]
    exoformer.attend = attend
    for hook in hooks:
        hook.remove()
    return {"raw": seen["raw"][0], "anchor": seen["anchor"]["v"][0, :, 0], "u": seen["u"][0, :, 0], "o": seen["out"][0],
            "mixed": {s: value[0, :, 0] for s, value in seen["mix"].items()}, "logits": logits}         # [T, d_h] each


def by_model(own):
    seen = run(build(own))
    v, u, o = seen["mixed"]["v"], seen["u"], seen["o"]
    weights = torch.linalg.solve(v.T, u[1])                                     # U = weights · V̂
    return {"rms": (seen["raw"] / seen["anchor"])[1, 0], "anchor": seen["anchor"][1], "mixed": v[1], "other": v[0],
            "weights": weights.flip(0), "retrieved": u[1], "gate": o[1] / u[1],     # W^O = 1, so O = U ⊙ σ(Ĝ)
            "gated": o[1], "first": o[0], "logits": seen["logits"].flatten()}


class Disagreement(Exception):
    pass


def show(step, equation, place, figure, **ways):
    """Print a step: its equation, the walkthrough's figure beside the exact one, and whether all ways agree."""
    ways = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in ways.items()}
    exact = next(iter(ways.values()))
    print(f"\n{step}\n    {equation}\n    exoformer.py: {place}")
    if figure is not None:
        print(f"    {'walkthrough':<12} " + "  ".join(f"{f:9.3f}" for f in figure))
    for name, value in ways.items():
        print(f"    {name:<12} " + "  ".join(f"{v:9.6f}" for v in value))
        if not np.allclose(value, exact, rtol=0, atol=1e-6):
            raise Disagreement(f"{step}: {name} gives {value}, {next(iter(ways))} gives {exact}")
    if figure is not None and not np.allclose(exact, figure, rtol=0, atol=1e-3):
        raise Disagreement(f"{step}: {exact}, but the walkthrough has {figure}")


STEPS = [   # key, name, equation, where it lives, the walkthrough's figure
    ("rms", "RMS of the anchor (3, 4)", "sqrt(mean(s²)) = √12.5", "RMSNorm", (3.536,)),
    ("anchor", "normalised anchor", "RMSNorm(V_anc)", "Anchor.forward", (0.849, 1.131)),
    ("mixed", "mixed value (0.598 is cut, not rounded: 0.598528)",
     "V̂ = 0.75 RMSNorm(V_anc) + 0.25 (1, -1)", "Mixing.forward", (0.886, 0.598)),
    ("other", "the first token's mixed value", "V̂ = 0.75 (1, 1) + 0.25 (-3, 1)", "Mixing.forward", (0, 1)),
    ("weights", "attention weights: on itself, on the first token",
     "softmax(q kᵀ / √d_h),  q, k = RoPE(RMSNorm(Q̂)), RoPE(RMSNorm(K̂))", "attend, rope", (0.8, 0.2)),
    ("retrieved", "retrieved", "U = 0.8 (0.886, 0.598) + 0.2 (0, 1)", "attend", (0.709, 0.679)),
    ("gate", "gate", "σ(Ĝ) = σ(0, -ln 3)", "Attention.forward", (0.5, 0.25)),
    ("gated", "gated: the second feature is positive, the own value's is not", "U ⊙ σ(Ĝ)", "Attention.forward",
     (0.355, 0.170)),
    ("first", "the first token's output: it sees only itself", "(0, 1) ⊙ σ(ln 3, 0)", "attend", (0, 0.5)),
    ("logits", "logits of both tokens, W^O and W_head being 1", "RMSNorm(H_0 + O) W_head", "ExoFormer.forward", None),
]


def static_half(own):
    hand, functions, model = by_hand(own), by_functions(own), by_model(own)
    for key, name, equation, place, figure in STEPS:
        show(name, equation, place, figure, **{"by hand": hand[key], "functions": functions[key], "model": model[key]})
    alone = run(build(own), tokens=(0, 0))              # another second token
    show("the first token's output whatever the second token is", "O_1 does not depend on token 2", "attend", None,
         **{"by hand": hand["first"], "model": alone["o"][0]})


@torch.no_grad()
def dynamic_half(own):
    static, dynamic = run(build(own, lam=(0.5, 0.5))), build(own, "exoformer-dynamic", lam=(1.0, 1.0))
    start = run(dynamic)
    show("dynamic, at the start: mixed value with λ = 1, γ = 0.5", "V̂ = (λ1 γ1) ⊙ RMSNorm(V_anc) + (λ2 γ2) ⊙ V",
         "Mixing.forward", None, **{"by hand": mix("v", own["v"], (1, 1), (0.5, 0.5))[1],
                                    "dynamic": start["mixed"]["v"][1], "static, λ=½": static["mixed"]["v"][1]})
    show("dynamic, at the start: O of both tokens", "as in the static model with λ = 0.5", "Attention.forward", None,
         static=static["o"].flatten(), dynamic=start["o"].flatten())

    # W1 looks at the second token alone: its first row w has w·x_1 = 0, w·x_2 = 1.  γ = σ(GELU(1) c) = 0.8 wants c:
    attn, gelu_1 = dynamic.blocks[0].attn, 0.5 * (1 + math.erf(math.sqrt(0.5)))
    attn.mix.W1.weight.zero_()[0] = torch.tensor(np.linalg.solve(rms_norm(EMBED), [0.0, 1.0]))
    attn.mix.W2.weight[4, 0] = math.log(4) / gelu_1     # γ in the order q1 q2 k1 k2 v1 v2 g1 g2: v1
    gamma = torch.stack(attn.mix.gamma(torch.tensor(rms_norm(EMBED))[None]), dim=-1)[0, :, 0, 0]    # [T, 8]
    pushed = run(dynamic)
    v1 = np.array([0.5, 0.8])
    show("dynamic, one γ pushed: γ of v1, for each token", "γ = σ(GELU(X W1) W2 + b)", "Mixing.gamma", None,
         **{"by hand": v1, "model": gamma[:, 4]})
    mixed = mix("v", own["v"], (1, 1), (v1[:, None], 0.5))
    show("dynamic, one γ pushed: the second token reuses more of its anchor", "V̂ = 0.8 RMSNorm(V_anc) + 0.5 (1, -1)",
         "Mixing.forward", None, **{"by hand": mixed[1], "model": pushed["mixed"]["v"][1]})
    show("dynamic, one γ pushed: the first token's value stays", "0.5 (1, 1) + 0.5 (-3, 1)", "Mixing.forward", None,
         **{"by hand": mixed[0], "model": pushed["mixed"]["v"][0], "at the start": start["mixed"]["v"][0]})


def main() -> int:
    own = own_projections()
    print("Two tokens, one head of width 2. The second token asks: its value anchor is (3, 4), its own value (1, -1),\n"
          "λ = (0.75, 0.25). The first one's mixed value is (0, 1). What does the second token get?")
    try:
        static_half(own)
        dynamic_half(own)
    except Disagreement as step:
        print(f"\nDISAGREES at {step}", file=sys.stderr)
        return 1
    print("\nAll steps agree: to 1e-6 between the three ways, to 0.001 with the walkthrough.")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")            # Greek, whatever the code page
    sys.exit(main())
