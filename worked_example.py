"""
The walkthrough of one value head. Begin here: run it, then read it beside exoformer.py.

    python worked_example.py                the story: why, the equation in numbers, where it lives
    python worked_example.py --verbose      and under each step what every way of computing it gave

Three ways lead to each number: by hand in NumPy, with the functions of exoformer.py, and with a
whole ExoFormer whose weights are set so that this is what it computes. They must agree to 1e-6,
in float64, and lie within 0.001 of the walkthrough's figure. The first step that does not ends
the run with "DISAGREES at" its name and exit code 1.

Order: the numbers -> the story, by hand -> dynamic mixing -> what if -> the two other ways ->
how a step is checked and shown -> how the weights were found.
"""

import argparse
import math
import sys
from unittest import mock

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

import exoformer

# --- The numbers ----------------------------------------------------------------------------------
# One layer, one head, d = d_h = 2, all gains 1, ε = 0. Arrays have one row for each token.
EMBED = np.array([[2.0, 1.0], [-1.0, 3.0]])                         # H_0
ANCHOR = {                                                          # S_anc = H_0 W_anc^S
    "v": np.array([[1.0, 1.0], [3.0, 4.0]]),
    "q": np.array([[1.0, 2.0], [3.0, -1.0]]),
    "k": np.array([[-2.0, 1.0], [1.0, 1.0]]),
    "g": np.array([[0.0, 2.0], [5.0, 1.0]]),
}
OWN = {"v": np.array([[-3.0, 1.0], [1.0, -1.0]])}                   # S_n; q, k, g: end of this file
LAM = {"v": (0.75, 0.25), "q": (0.5, 0.5), "k": (0.6, 0.4), "g": (0.9, 0.1)}    # λ1, λ2


# --- The story, by hand ---------------------------------------------------------------------------
def rms_norm(s):
    return s / np.sqrt(np.mean(s**2, axis=-1, keepdims=True))


def mix(s, weights):
    return weights[0] * rms_norm(ANCHOR[s]) + weights[1] * OWN[s]


def rotate(s, position):
    """RoPE: with d_h = 2 there is one pair of channels, turned by one radian per position."""
    cos, sin = math.cos(position), math.sin(position)
    return np.array([s[0] * cos - s[1] * sin, s[1] * cos + s[0] * sin])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def story(step):
    """The static half. Returns what the changed models of what_if are compared with."""
    others = other_ways()
    first_anchor, anchor = ANCHOR["v"]
    first_own, own = OWN["v"]
    lam1, lam2 = LAM["v"]
    print(say("""\
The walkthrough of one value head, three ways: by hand in NumPy, with the functions of exoformer.py,
and with a whole model whose weights are set so that this is what it computes. To the right of each
step stands where in exoformer.py it happens, and below that which of the ways agree.

Two tokens, one head of width 2. The second token asks: what do I take from the two of us? It has
two values to offer: an anchor {}, made from its embedding once for all layers, and {},
which this layer projects from its own input. The learned λ = {} says how they mix.""",
              anchor, own, LAM["v"]))

    # RMSNorm(s) = s / sqrt(mean(s²))
    rms = np.sqrt(np.mean(anchor**2))
    normalised = anchor / rms
    step("Normalise", "divided by its RMS, the anchor counts by direction, not by size",
         say("√(({}² + {}²) / 2) = {}   {} / {} = {}", *anchor, rms, anchor, rms, normalised),
         "Anchor.exogenous", (3.536, 0.849, 1.131),
         by_hand={"rms": rms, "normalised": normalised}, **others)

    # V̂ = λ1 RMSNorm(V_anc) + λ2 V
    mixed = lam1 * normalised + lam2 * own
    step("Mix", "λ1 times what the embedding says plus λ2 times what this layer sees",
         say("{} {} + {} {} = {}", lam1, normalised, lam2, own, mixed),
         "Mixing.forward", (0.886, 0.598), by_hand={"mixed": mixed}, **others)

    # Normalising leaves this anchor as it is: its RMS is 1.
    first = mix("v", LAM["v"])[0]
    step("First token", "it mixes with the same λ; the RMS of its anchor is 1 already",
         say("{} {} + {} {} = {}", lam1, first_anchor, lam2, first_own, first),
         "Mixing.forward", (0, 1), by_hand={"first": first}, **others)

    # A = softmax(q kᵀ / √d_h),  q, k = RoPE(RMSNorm(Q̂)), RoPE(RMSNorm(K̂))
    q = rotate(rms_norm(mix("q", LAM["q"])[1]), position=1)
    k = rotate(rms_norm(mix("k", LAM["k"])[1]), position=1)
    first_k = rotate(rms_norm(mix("k", LAM["k"])[0]), position=0)
    scores = np.array([q @ k, q @ first_k]) / math.sqrt(2)
    weights = np.exp(scores) / np.exp(scores).sum()
    step("Attend", "it scores itself ln 4 above the first token, so four shares to one",
         say("softmax{} = {}", scores, weights),
         "rope, attend", (0.8, 0.2), by_hand={"weights": weights}, **others)

    # U = A V̂
    retrieved = weights[0] * mixed + weights[1] * first
    step("Retrieve", "of each token's mixed value it takes the share just found",
         say("{} {} + {} {} = {}", weights[0], mixed, weights[1], first, retrieved),
         "attend", (0.709, 0.679), by_hand={"retrieved": retrieved}, **others)

    # σ(Ĝ)
    first_gate, gate = sigmoid(mix("g", LAM["g"]))
    step("Gate", "how far to open each feature; its logits are mixed as well",
         say("σ{} = {}", mix("g", LAM["g"])[1], gate),
         "Attention.forward", (0.5, 0.25), by_hand={"gate": gate}, **others)

    # U ⊙ σ(Ĝ)
    gated = retrieved * gate
    step("Let through", "the second feature stays positive; its own value's is not",
         say("{} ⊙ {} = {}", retrieved, gate, gated),
         "Attention.forward", (0.355, 0.170), by_hand={"gated": gated}, **others)

    # The causal mask leaves the first token nothing but itself: U = V̂.
    first_gated = first * first_gate
    step("No looking ahead", "the first token sees only itself, whatever comes second",
         say("{} ⊙ {} = {}", first, first_gate, first_gated),
         "attend", (0, 0.5), by_hand={"first_gated": first_gated}, **others,
         another_second_token=watch(build(), tokens=(0, 0)))

    # logits = RMSNorm(H_0 + O) W_head: the feed-forward adds 0, W^O and W_head are identities.
    outputs = np.array([first_gated, gated])
    logits = rms_norm(EMBED + outputs)
    step("Logits", "add that to the embedding, normalise, and read it out as it is",
         say("RMSNorm({} + {}) = {}\nRMSNorm({} + {}) = {}",
             EMBED[0], first_gated, logits[0], EMBED[1], gated, logits[1]),
         "ExoFormer.forward", by_hand={"logits": logits}, **others)
    return first, weights, gate, gated, logits


# --- Dynamic mixing -------------------------------------------------------------------------------
@torch.no_grad()
def dynamic(step):
    print("\nDYNAMIC MIXING: each token chooses a γ for each λ. Here λ = 1, in q, k and g too.")
    anchor = rms_norm(ANCHOR["v"])
    own = OWN["v"]
    static = watch(build(lam={s: (0.5, 0.5) for s in LAM}))
    model = build("exoformer-dynamic", lam={s: (1.0, 1.0) for s in LAM})
    start = watch(model)

    # V̂ = λ1 γ1 ⊙ RMSNorm(V_anc) + λ2 γ2 ⊙ V.  At the start γ = σ(0).
    half = sigmoid(0.0)
    first, mixed = mix("v", (1 * half, 1 * half))
    step("Start", "λ = 1 and γ = 0.5 mix as a static λ = 0.5 does",
         say("1 · {} {} + 1 · {} {} = {}", half, anchor[1], half, own[1], mixed),
         "Mixing.terms", by_hand={"first": first, "mixed": mixed}, static=static, dynamic=start)
    outputs = {"first_gated": static["first_gated"], "gated": static["gated"]}
    step("Same output", "a dynamic model starts as that static one, for both tokens",
         say("O = {} and {}", *outputs.values()), "Attention.forward",
         static=outputs, dynamic=start)

    # γ = σ(GELU(X W1) W2 + b), with GELU(x) = x Φ(x). One column of W1 gives 0 for the first
    # token and 1 for the second. One entry of W2, c, takes that to γ1 of v: it is σ(GELU(1) c).
    gelu_1 = 0.5 * (1 + math.erf(math.sqrt(0.5)))
    c = math.log(4) / gelu_1                                        # σ(ln 4) = 0.8
    mixing = model.blocks[0].attn.mixing
    X = rms_norm(EMBED)
    mixing.W1.weight.zero_()
    mixing.W1.weight[0] = torch.tensor(np.linalg.solve(X, [0.0, 1.0]))
    mixing.W2.weight[4, 0] = c                                      # q1 q2 k1 k2 v1 v2 g1 g2
    gamma1 = sigmoid(np.array([0.0, gelu_1 * c]))                   # of each token
    seen = mixing.gamma(torch.tensor(X)[None])["v"]
    step("Push one γ", "the second token asks for more of its anchor, the first does not",
         say("γ1 = σ(GELU(1) · {}) = {} and σ(GELU(0) · {}) = {}", c, gamma1[1], c, gamma1[0]),
         "Mixing.gamma", by_hand={"gamma1": gamma1, "gamma2": [half, half]},
         model={"gamma1": seen[0], "gamma2": seen[1]})
    first, mixed = mix("v", (gamma1[:, None], half))
    step("One token's reuse", "the second mixes differently now, the first as before",
         say("{} {} + {} {} = {}\n{} {} + {} {} = {}",
             gamma1[1], anchor[1], half, own[1], mixed, gamma1[0], anchor[0], half, own[0], first),
         "Mixing.forward", by_hand={"first": first, "mixed": mixed}, model=watch(model))


# --- What if --------------------------------------------------------------------------------------
def what_if(step, first, weights, gate, gated, logits):
    print("\nWHAT IF: the first model again, one thing changed")
    anchor = ANCHOR["v"][1]
    own = OWN["v"][1]
    lam1, lam2 = LAM["v"]

    # All tokens share λ, so the first one loses its anchor too. What it gives must stay the same
    # for the comparison, so its own projection is set to what its mix was.
    lam = LAM | {"v": (0.0, 1.0)}
    projected = OWN | {"v": np.array([first, own])}
    retrieved = weights[0] * own + weights[1] * first
    bare = retrieved * gate
    why = say("λ = {}, the first token's value still {}: a sign flips", lam["v"], first)
    step("No anchor", why,
         say("{} → {} → {}", own, retrieved, bare), "Mixing.lam",
         by_hand={"mixed": own, "retrieved": retrieved, "gated": bare},
         **other_ways(lam=lam, own=projected))

    swamped = lam1 * anchor + lam2 * own
    step("No norm", "the anchor swamps the token, only because it is long",
         say("{} {} + {} {} = {}", lam1, anchor, lam2, own, swamped), "Config.anchor_norm",
         by_hand={"mixed": swamped}, **other_ways(anchor_norm="qkg"))

    huge = ANCHOR | {"v": 100 * ANCHOR["v"]}
    mixed = lam1 * rms_norm(100 * anchor) + lam2 * own
    step("Huge anchor", "with the norm nothing changes, up to the logits",
         say("{} RMSNorm{} + {} {} = {}", lam1, 100 * anchor, lam2, own, mixed),
         "Anchor.norm", by_hand={"mixed": mixed, "logits": logits}, **other_ways(anchor=huge))

    print(say("""
WHAT IT TEACHES
A positive feature is not a better one. With the anchor the second feature came out as {},
without it as {}: the anchor reached the output. Whether that helps, only training shows.
Mixing, attention and gating are three different operations. Mixing joins two values of one token,
attention joins the values of several tokens, gating scales each feature of what comes back.""",
              gated[1], bare[1]))


# --- The two other ways: with the functions, with a whole model -----------------------------------
def other_ways(**changes):
    return {"functions": by_functions(**changes), "model": watch(build(**changes))}


def config(variant="exoformer", **changes):
    return exoformer.Config.variant(variant, vocab_size=2, block_size=2, n_layer=1, n_head=1,
                                    n_embd=2, norm_eps=0.0, **changes)


def heads(rows):
    return torch.tensor(rows)[None, :, None]                        # [T, d_h] -> [B, T, h, d_h]


@torch.no_grad()
def by_functions(anchor=ANCHOR, own=OWN, lam=LAM, anchor_norm="qkvg"):
    norm = exoformer.RMSNorm(2, eps=0.0).double()
    norm.weight.fill_(1.0)
    mixing = exoformer.Mixing(config()).double()
    for s in LAM:
        mixing.lam[s].copy_(torch.tensor(lam[s]).view(2, 1, 1))
    H = torch.tensor(EMBED)
    raw = {s: heads(anchor[s]) for s in LAM}
    anchors = exoformer.normalise({s: norm for s in anchor_norm}, raw)
    mixed = mixing(norm(H)[None], {s: heads(own[s]) for s in LAM}, anchors)
    normalised = exoformer.normalise({"q": norm, "k": norm}, mixed)
    cos, sin = exoformer.rope_table(2, 2, 500_000.0)
    q = exoformer.rope(normalised["q"], cos, sin)
    k = exoformer.rope(normalised["k"], cos, sin)
    U = exoformer.attend(q, k, mixed["v"])
    A = exoformer.attend(q, k, heads(np.eye(2)))                    # A times unit vectors
    gate = mixed["g"].sigmoid()
    O = U * gate
    return quantities(raw, anchors, mixed, A, U, gate, O, logits=norm(H + O[0, :, 0]))


@torch.no_grad()
def build(variant="exoformer", anchor=ANCHOR, own=OWN, lam=LAM, anchor_norm="qkvg"):
    """A model with these anchors and projections. W^O and W_head are identities."""
    model = exoformer.ExoFormer(config(variant, anchor_norm=anchor_norm)).double()
    attn = model.blocks[0].attn
    model.embed.weight.copy_(torch.tensor(EMBED))
    for s in LAM:               # the rows of EMBED are independent: a matrix can send them anywhere
        W_anc = np.linalg.solve(EMBED, anchor[s])                   # H_0 W_anc = S_anc
        W = np.linalg.solve(rms_norm(EMBED), own[s])                # X_1 W = S_1
        model.anchor.W_anc[s].weight.copy_(torch.tensor(W_anc.T))
        attn.W[s].weight.copy_(torch.tensor(W.T))
        attn.mixing.lam[s].copy_(torch.tensor(lam[s]).view(2, 1, 1))
    attn.W_O.weight.copy_(torch.eye(2))
    model.W_head.weight.copy_(torch.eye(2))
    return model


@torch.no_grad()
def watch(model, tokens=(0, 1)):
    """Run model(tokens) and return what was seen on the way."""
    seen = {}
    attend = exoformer.attend

    def keep(module, inputs, output):
        seen[module] = inputs, output

    def attend_and_keep(q, k, v):
        seen["A"] = attend(q, k, heads(np.eye(2)))
        seen["U"] = attend(q, k, v)
        return seen["U"]

    spy = mock.patch.object(exoformer, "attend", attend_and_keep)
    with spy, register_module_forward_hook(keep):
        logits, _ = model(torch.tensor([tokens]))
    attn = model.blocks[0].attn
    raw = {"v": seen[model.anchor.W_anc["v"]][1].unsqueeze(2)}
    (_, _, anchors), mixed = seen[attn.mixing]
    O = seen[attn.W_O][1].unsqueeze(2)                              # W^O = 1, so O = U ⊙ σ(Ĝ)
    return quantities(raw, anchors, mixed, seen["A"], seen["U"], O / seen["U"], O, logits[0])


def quantities(raw, anchors, mixed, A, U, gate, O, logits):
    """By name, what the steps are about: the second token's, where it does not say first."""
    one, two = (0, 0, 0), (0, 1, 0)                                 # of [B, T, h]
    return {"rms": raw["v"][two][0] / anchors["v"][two][0], "normalised": anchors["v"][two],
            "mixed": mixed["v"][two], "first": mixed["v"][one], "weights": A[two].flip(0),
            "retrieved": U[two], "gate": gate[two], "gated": O[two], "first_gated": O[one],
            "logits": logits}


# --- How a step is checked and shown --------------------------------------------------------------
class Disagreement(Exception):
    pass


class Walk:
    def __init__(self, verbose):
        self.verbose = verbose
        self.steps = 0

    def step(self, name, why, equation, where, figure=(), **ways):
        """Print a step, then raise Disagreement if the ways or the walkthrough's figure differ.

        Each way is a dict of quantities. The keys of the first say which ones the step is about.
        """
        self.steps += 1
        keys = next(iter(ways.values())).keys()
        values = {}
        for way, seen in ways.items():
            arrays = [np.ravel(np.asarray(seen[key], dtype=np.float64)) for key in keys]
            values[way.replace("_", " ")] = np.concatenate(arrays)
        exact = next(iter(values.values()))
        wrong = [way for way in values if not np.allclose(values[way], exact, rtol=0, atol=1e-6)]
        ticks = "   ".join(way + (" ✗" if way in wrong else " ✓") for way in values)
        print("\n" + spread(f"{self.steps:2}. {name}: {why}", where))
        print(spread("    " + equation.replace("\n", "\n    "), ticks))
        if self.verbose:
            for way, value in values.items():
                print(f"      {way:22}" + "".join(f"{x:12.6f}" for x in value))
            if figure:
                print(f"      {'walkthrough':22}" + "".join(f"{x:12.3f}" for x in figure))

        for way in wrong:
            found, expected = values[way].round(6).tolist(), exact.round(6).tolist()
            raise Disagreement(f"{name}: {way} has {found}, expected {expected}")
        for x, printed in zip(exact, figure):
            if not abs(x - printed) < 0.001:
                raise Disagreement(f"{name}: {x:.6f}, but the walkthrough has {printed}")
            if abs(x - printed) > 0.0005:
                print(f"    The walkthrough has {printed}: it cuts {x:.6f}, "
                      f"where rounding gives {x:.3f}.")


def spread(left, right):
    return left + right.rjust(100 - len(left.split("\n")[-1]))


def say(text, *numbers):
    """Put the numbers into the text: with two decimals where those are exact, else three."""
    def show(x):
        if np.ndim(x) == 1:
            return "(" + ", ".join(show(channel) for channel in x) + ")"
        short = round(float(x), 2) + 0.0                            # + 0.0 makes a 0 of -0.0
        return f"{short:g}" if abs(x - short) < 1e-9 else f"{x:.3f}"

    return text.format(*(show(x).replace("-", "−") for x in numbers))


# --- How the weights were found: backwards, from the mixes that are wanted ------------------------
def direction(angle, length):
    return length * np.array([math.cos(angle), math.sin(angle)])


# QKNorm makes |q| = |k| = √2, whatever their length was, so a score q·k / √2 is √2 cos(angle
# between them). The query and its own key get one angle: score √2. The first key must score ln 4
# less, for the weights 0.8 and 0.2: it stands at the angle APART. As RoPE turns the second token
# by one radian and the first by none, the first key gets that radian here.
APART = math.acos(1 - math.log(4) / math.sqrt(2))
MIXED = {
    "q": np.array([direction(2.0, 0.9), direction(0.4, 1.7)]),
    "k": np.array([direction(0.4 + 1 - APART, 2.3), direction(0.4, 0.6)]),
    "g": np.array([[math.log(3), 0.0], [0.0, -math.log(3)]]),       # σ: (0.75, 0.5), (0.5, 0.25)
}
for s, wanted in MIXED.items():     # Ŝ = λ1 RMSNorm(S_anc) + λ2 S, solved for the layer's own S
    OWN[s] = (wanted - LAM[s][0] * rms_norm(ANCHOR[s])) / LAM[s][1]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("worked_example.py", argparse.SUPPRESS, allow_abbrev=False,
                                     description="The walkthrough of one value head, checked.")
    parser.add_argument("--verbose", action="store_true",
                        help="print under each step what every way of computing it gave")
    walk = Walk(parser.parse_args(argv).verbose)
    try:
        results = story(walk.step)
        dynamic(walk.step)
        what_if(walk.step, *results)
    except Disagreement as error:
        print(f"\nDISAGREES at {error}", file=sys.stderr)
        return 1
    print(f"\nAll {walk.steps} steps agree: to 1e-6 among the ways, to 0.001 with the walkthrough.")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")                        # ✓ and Greek on every console
    sys.exit(main(sys.argv[1:]))
