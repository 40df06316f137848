"""
ExoFormer: a transformer whose layers mix their attention projections with anchors, which are
computed once, from the embedding, and read by every layer.

    Jonathan Su, "Attention Projection Mixing with Exogenous Anchors", ICML 2026, arXiv 2601.08131v4

The paper stands first and ends at the banner AROUND IT; what follows there only serves it.

Letters: B batch, T positions of this call, P positions in the cache before it, V vocab_size,
d n_embd, h n_head, d_h = d / h, m components that mix. S is one of Q, K, V, G: query, key, value,
gate logit; "q", "k", "v", "g" in the code. Layers count n = 1 .. N; H_0 is the embedding, H_n the
output of layer n. λ1, λ2 are learned, for each layer and S. σ is the sigmoid, ⊙ multiplies by
channel. RMSNorm runs over d for H and over d_h for S. Where S does not mix, Ŝ_n = S_n.

    H_0    = Embed(tokens)                                      no position information in it
    S_anc  = H_0 W_anc^S                                        the anchors, once (or H_k, or S_1)
    S_n    = X_n W_n^S,  X_n = RMSNorm(H_{n-1})                 the layer's own projections
    γ      = σ(GELU(X_n W1) W2 + b)                             for each token, or 1 (static)
    Ŝ_n    = λ1 γ1 ⊙ RMSNorm(S_anc) + λ2 γ2 ⊙ S_n               mixing, Eq. 10
    q, k   = RoPE(RMSNorm(Q̂_n)), RoPE(RMSNorm(K̂_n))             QKNorm, then rotate
    U_n    = softmax(q kᵀ / √d_h + causal mask) V̂_n             attention
    O_n    = concat_heads(U_n ⊙ σ(Ĝ_n)) W_n^O                   its output, gated
    H'     = H_{n-1} + O_n
    H_n    = H' + SwiGLU(RMSNorm(H'))                           feed-forward
    logits = RMSNorm(H_N) W_head
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatch
from math import inf
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COMPONENTS = "qkvg"             # query, key, value, gate logit
TINY = torch.finfo(torch.float32).tiny
Components = dict[str, Tensor]  # {s: [B, T, h, d_h]}, s a letter of COMPONENTS


@dataclass(frozen=True)
class Config:
    """Sizes and the axes of the design (§3). Raises ValueError for a setting that cannot work.

    With anchor="none" the fields mix, granularity and anchor_norm have no effect.
    """
    vocab_size: int = 256               # V
    block_size: int = 256               # longest sequence of one forward, in tokens
    n_layer: int = 6                    # N
    n_head: int = 6                     # h
    n_embd: int = 384                   # d
    gate: bool = True                   # multiply the attention output by σ(Ĝ), by channel
    anchor: str = "exogenous"           # none | internal: layer 1's S_1 | exogenous: H_k W_anc
    anchor_layer: int = 0               # the k of the H_k that exogenous anchors read
    mix: str = COMPONENTS               # components that mix with their anchor
    granularity: str = "elementwise"    # one λ per layer (scalar), head (headwise) or channel
    anchor_norm: str = COMPONENTS       # anchors normalised before mixing (if they mix), or none
    post_norm: str = "qk"               # normalised after mixing, in every layer: qk | qkv | qkvg
    dynamic: bool = False               # multiply each λ by a factor γ of the token (§3.6)
    rope_theta: float = 500_000.0       # base θ of the rotary angles
    norm_eps: float = 1e-6              # ε of every RMSNorm

    def __post_init__(self):
        check(self)                     # at the end of this file

    @classmethod
    def variant(cls, name: str, **overrides) -> "Config":
        """The system `name` of VARIANTS, some fields changed. Raises ValueError."""
        one_of("variant", name, VARIANTS)
        for key in overrides:
            one_of("setting", key, [field.name for field in fields(cls)])
        return cls(**VARIANTS[name] | overrides)

    @property
    def d_h(self) -> int:
        return self.n_embd // self.n_head

    @property
    def first_mixing_layer(self) -> int:
        """The first layer that mixes, as do all after it. N + 1, so none, without an anchor."""
        N, k = self.n_layer, self.anchor_layer
        return {"exogenous": k + 1, "internal": 2, "none": N + 1}[self.anchor]


RESFORMER = dict(anchor="internal", mix="v", anchor_norm="none", granularity="scalar")

VARIANTS: dict[str, dict] = {           # the systems of the paper, as changes to the fields above
    "base":              dict(gate=False, anchor="none"),
    "gated":             dict(gate=True, anchor="none"),
    "resformer":         dict(gate=False, **RESFORMER),
    "gated-resformer":   dict(gate=True, **RESFORMER),
    "nuresformer":       dict(gate=True, anchor="internal"),
    "exoformer":         dict(gate=True, anchor="exogenous"),
    "exoformer-dynamic": dict(gate=True, anchor="exogenous", dynamic=True),
}


# --- Norms and projections ------------------------------------------------------------------------
class RMSNorm(nn.Module):
    """RMSNorm(x) = gain ⊙ x / sqrt(mean(x²) + ε) over the last axis; the gain is learned."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))    # filled by ExoFormer.init_weights
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.to(x.dtype)          # under autocast x is bfloat16: one dtype is faster
        return F.rms_norm(x, gain.shape, gain, self.eps).type_as(x)     # CUDA's gives float32 there


def normalise(norm: nn.ModuleDict, components: Components) -> Components:
    """RMSNorm(S), one gain for all heads. A component without a norm stays as it is."""
    return components | {s: norm[s](components[s]) for s in norm}


def project(W: nn.ModuleDict, x: Tensor, h: int) -> Components:
    """x W^S for each component, cut into heads: x [B, T, d] -> {s: [B, T, h, d_h]}."""
    return {s: W[s](x).unflatten(-1, (h, -1)) for s in W}


# --- Anchors and mixing: what the paper adds to a gated transformer -------------------------------
class Anchor(nn.Module):
    """The anchors of the components that mix: made once, read by every layer that mixes (§3)."""

    def __init__(self, config: Config):
        super().__init__()
        d, self.h = config.n_embd, config.n_head
        projected = config.mix if config.anchor == "exogenous" else ""
        normalised = [s for s in config.mix if s in config.anchor_norm]
        self.W_anc = nn.ModuleDict({s: nn.Linear(d, d, bias=False) for s in projected})
        self.norm = nn.ModuleDict({s: RMSNorm(config.d_h, config.norm_eps) for s in normalised})

    def exogenous(self, H_k: Tensor) -> Components:
        """RMSNorm(S_anc), S_anc = H_k W_anc^S: the raw H_k, k being config.anchor_layer."""
        return normalise(self.norm, project(self.W_anc, H_k, self.h))

    def internal(self, S_1: Components) -> Components:
        """RMSNorm(S_anc), S_anc = S_1: layer 1's own projections, which serve it as well."""
        return normalise(self.norm, S_1)


class Mixing(nn.Module):
    """One layer's Ŝ_n from the anchors and its own S_n, for the components that mix (Eq. 10)."""

    def __init__(self, config: Config):
        super().__init__()
        d, h, d_h = config.n_embd, config.n_head, config.d_h
        shape = {"scalar": (1, 1), "headwise": (h, 1), "elementwise": (h, d_h)}[config.granularity]
        pairs = [(s, torch.empty(2, *shape)) for s in config.mix]   # λ1, λ2
        self.lam = nn.ParameterDict(pairs)      # it sorts a dict, but gamma needs the order of mix
        self.dynamic = config.dynamic
        if config.dynamic:
            self.W1 = nn.Linear(d, 16, bias=False)
            self.W2 = nn.Linear(16, 2 * len(config.mix))        # with b, the model's only bias

    def gamma(self, X: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """γ = σ(GELU(X_n W1) W2 + b), §3.6: {s: (γ1, γ2)}, one number for each token."""
        gamma = self.W2(F.gelu(self.W1(X))).sigmoid()           # [B, T, 2m]
        gamma = gamma.unflatten(-1, (-1, 1, 1)).unbind(2)       # 2m of [B, T, 1, 1]
        return dict(zip(self.lam, zip(gamma[0::2], gamma[1::2])))   # in W2's order: q1 q2 k1 ...

    def terms(self, X: Tensor, own: Components, anchors: Components
              ) -> dict[str, tuple[Tensor, Tensor]]:
        """{s: (λ1 γ1 ⊙ anchor, λ2 γ2 ⊙ own)} of what mixes, [B, T, h, d_h] each."""
        gamma = self.gamma(X) if self.dynamic else {}
        terms = {}
        for s, lam in self.lam.items():
            lam1, lam2 = lam.to(own[s].dtype)                   # [1|h, 1|d_h] each, by granularity
            term1, term2 = lam1 * anchors[s], lam2 * own[s]
            if self.dynamic:        # one by one: λ γ would be a tensor as large as the component
                gamma1, gamma2 = gamma[s]                       # [B, T, 1, 1] each
                term1, term2 = gamma1 * term1, gamma2 * term2
            terms[s] = (term1, term2)
        return terms

    def forward(self, X: Tensor, own: Components, anchors: Components) -> Components:
        """Ŝ_n of the components that mix, S_n of the others."""
        mixed = dict(own)
        for s, (from_anchor, from_own) in self.terms(X, own, anchors).items():
            mixed[s] = from_anchor + from_own           # λ1 γ1 ⊙ anchor + λ2 γ2 ⊙ own
        return mixed


# --- RoPE and attention ---------------------------------------------------------------------------
def rope_table(block_size: int, d_h: int, theta: float) -> Tensor:
    """(cos, cos) and (−sin, sin) of position · θ^(−2i/d_h): [2, block_size, 1, d_h]."""
    frequency = theta ** (-torch.arange(0, d_h, 2, dtype=torch.float64) / d_h)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency)
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
    return torch.stack((cos, sin)).unsqueeze(2).float()         # float64 up to here


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (a, b) = (channel i, channel i + d_h/2) of x [B, T, h, d_h].

    cos and sin are rows of rope_table, one for each of the T positions: [T, 1, d_h].
    """
    # (a cos − b sin, b cos + a sin) = (a, b) ⊙ (cos, cos) + (b, a) ⊙ (−sin, sin)
    # Rolling x takes fewer copies than cutting and joining its halves: experiments/bench.py rope.
    cos, sin = cos.type_as(x), sin.type_as(x)       # or bfloat16 would be widened to float32 here
    b_a = x.roll(x.size(-1) // 2, dims=-1)
    return x * cos + b_a * sin


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d_h + causal mask) v: q [B, T, h, d_h], k and v [B, P + T, h, d_h]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))            # [B, h, T or P + T, d_h]
    T = q.size(2)
    P = k.size(2) - T
    if P == 0:
        U = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif T == 1:            # a single query sees every key
        U = F.scaled_dot_product_attention(q, k, v)
    else:                   # query i sees the keys 0 .. P + i, but is_causal would end at key i
        mask = torch.ones(T, P + T, dtype=torch.bool, device=q.device).tril(P)
        U = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return U.transpose(1, 2)                                    # [B, T, h, d_h]


class Attention(nn.Module):
    """Causal attention on mixed projections, its output gated channel by channel."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        d, d_h, self.h = config.n_embd, config.d_h, config.n_head
        letters = COMPONENTS if config.gate else COMPONENTS.replace("g", "")
        self.W = nn.ModuleDict({s: nn.Linear(d, d, bias=False) for s in letters})
        self.mixing = Mixing(config) if layer >= config.first_mixing_layer else None
        self.norm = nn.ModuleDict({s: RMSNorm(d_h, config.norm_eps) for s in config.post_norm})
        self.W_O = nn.Linear(d, d, bias=False)

    def forward(self, X: Tensor, anchors: Components | None, cos: Tensor, sin: Tensor,
                cache: "Cache | None") -> tuple[Tensor, Components]:
        own = project(self.W, X, self.h)                        # S_n {s: [B, T, h, d_h]}
        mixed = own                                             # Ŝ_n = S_n where nothing mixes
        if self.mixing is not None:
            mixed = self.mixing(X, own, anchors)                # Ŝ_n
        mixed = normalise(self.norm, mixed)                     # of post_norm: "qk" is QKNorm
        q = rope(mixed["q"], cos, sin)
        k = rope(mixed["k"], cos, sin)
        v = mixed["v"]
        if cache is not None:
            k, v = cache.append(k, v)           # stores them, returns all: [B, P + T, h, d_h]
        U = attend(q, k, v)                                     # U_n [B, T, h, d_h]
        if "g" in mixed:
            U = U * mixed["g"].sigmoid()                        # U_n ⊙ σ(Ĝ_n)
        O = self.W_O(U.flatten(2))                              # O_n [B, T, d]
        return O, own


# --- Feed-forward, block, model -------------------------------------------------------------------
class SwiGLU(nn.Module):
    """W_down( silu(W_gate z) ⊙ (W_up z) ), width 2d: 6d² weights. W_gate is not the gate G."""

    def __init__(self, config: Config):
        super().__init__()
        d = config.n_embd
        self.W_gate = nn.Linear(d, 2 * d, bias=False)
        self.W_up = nn.Linear(d, 2 * d, bias=False)
        self.W_down = nn.Linear(2 * d, d, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.W_down(F.silu(self.W_gate(z)) * self.W_up(z))


class Block(nn.Module):
    """Layer n: H_{n-1} -> (H_n, S_n). S_n is returned because S_1 may become the anchor."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, H: Tensor, anchors: Components | None, cos: Tensor, sin: Tensor,
                cache: "Cache | None") -> tuple[Tensor, Components]:
        O, own = self.attn(self.attn_norm(H), anchors, cos, sin, cache)
        H = H + O                                               # H'
        H = H + self.mlp(self.mlp_norm(H))                      # H_n [B, T, d]
        return H, own


class ExoFormer(nn.Module):
    """The language model of `config`, freshly initialised from the global seed."""

    def __init__(self, config: Config):
        super().__init__()
        # First, as the layers' constructors draw too, a different number in each variant.
        seed = int(torch.randint(2**32, (), device="cpu"))
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.anchor = Anchor(config) if config.anchor != "none" else None
        self.blocks = nn.ModuleList(Block(config, n) for n in range(1, config.n_layer + 1))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.W_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        table = rope_table(config.block_size, config.d_h, config.rope_theta)
        self.register_buffer("cos_sin", table, persistent=False)
        self.init_weights(seed)

    def forward(self, idx: Tensor, targets: Tensor | None = None,
                cache: "list[Cache] | None" = None) -> tuple[Tensor, Tensor | None]:
        """Next-token logits [B, T, V] for the ids idx [B, T], and with `targets` [B, T] the loss.

        The loss is the mean cross-entropy in nats, or None. `cache`, from new_cache, is one Cache
        a layer, with k and v of the P positions before idx. ValueError for more than block_size
        positions and for targets of another shape. Ids must lie in [0, V): generate and the data
        loader check that, because a look at them here would make a GPU wait.
        """
        T = idx.size(1)
        P = 0 if cache is None else cache[0].length
        if P + T > self.config.block_size:
            raise ValueError(f"{P + T} tokens: expected at most block_size={self.config.block_size}"
                             ", cut the sequence or build a model with a larger block_size")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets of shape {list(targets.shape)}: "
                             f"expected idx's shape {list(idx.shape)}")

        cos, sin = self.cos_sin[:, P:P + T]                     # [T, 1, d_h] each
        H = self.embed(idx)                                     # H_0 [B, T, d]
        anchors = own = None
        for n, block in enumerate(self.blocks, 1):
            if n == self.config.first_mixing_layer:
                if self.config.anchor == "exogenous":
                    anchors = self.anchor.exogenous(H)          # from H_k, k = n - 1
                else:
                    anchors = self.anchor.internal(own)         # n = 2, so own is S_1
            layer_cache = None if cache is None else cache[n - 1]
            H, own = block(H, anchors, cos, sin, layer_cache)   # H_n, S_n
        logits = self.W_head(self.norm(H))                      # [B, T, V]
        if targets is None:
            return logits, None
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))     # not in bfloat16
        return logits, F.cross_entropy(exact.flatten(0, 1), targets.flatten())

# ==================================================================================================
#   AROUND IT. The paper ends here. Below: the rest of ExoFormer's methods (initialisation, moving,
#   generation, counting), then the cache and the checks of Config.
# ==================================================================================================

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Every initialisation of the model. Raises ValueError unless one row fits each parameter.

        Each draws from a generator of its own, seeded by its name: so one seed gives parameters of
        the same name the same start in every variant, but for λ, which γ halves in a dynamic one.
        """
        table = {
            "*norm*.weight":    1.0,            # all gains
            "*.lam.*":          1.0 if self.config.dynamic else 0.5,
            "*.W2.*":           0.0,            # W2 = b = 0, so γ = σ(0) = 0.5
            "*.W_O.weight":     0.0,            # a layer starts by changing nothing,
            "*.W_down.weight":  0.0,
            "W_head.weight":    0.0,            # and logits start at 0
            "embed.weight":     "normal",       "*.W_anc.?.weight": "normal",
            "*.W.?.weight":     "normal",       "*.W1.weight":      "normal",
            "*.W_gate.weight":  "normal",       "*.W_up.weight":    "normal",
        }
        for name, p in self.named_parameters():
            rows = [value for pattern, value in table.items() if fnmatch(name, pattern)]
            if len(rows) != 1:
                raise ValueError(f"parameter {name!r} matches {len(rows)} rows of init_weights: "
                                 "expected one, add or narrow a row")
            if rows[0] == "normal":
                generator = torch.Generator().manual_seed((seed + crc32(name.encode())) % 2**32)
                w = torch.empty(p.shape, device="cpu")          # there, for every device alike
                nn.init.trunc_normal_(w, std=0.02, a=-0.06, b=0.06, generator=generator)
                p.copy_(w)
            else:
                p.fill_(rows[0])

    def _apply(self, fn, recurse=True):
        # .to(), .cuda(), .bfloat16() change the model through this method of nn.Module. The RoPE
        # table moves with it but stays float32: in bfloat16 rows past 256 may be equal.
        table = self.cos_sin
        super()._apply(fn, recurse)
        self.cos_sin = table.to(self.cos_sin.device)
        return self

    def new_cache(self) -> list["Cache"]:
        """An empty cache for forward: one entry a layer, for one batch in chunks of any length."""
        return [Cache(self.config.block_size) for _ in self.blocks]

    def stream(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
               top_k: int | None = None, generator: torch.Generator | None = None
               ) -> Iterator[Tensor]:
        """Continue the ids idx [B, T], yielding each new token [B] as it is drawn.

        Draws from softmax(logits / temperature), of the `top_k` likeliest tokens if given (at most
        V); temperature 0 takes the likeliest. `generator` is on the model's device. A prompt is
        cut to its last block_size tokens, and whenever the context is full, the model starts again
        from its last half. Raises ValueError, at the first token, for arguments out of range.
        """
        V = self.config.vocab_size
        block_size = self.config.block_size
        shape = list(idx.shape)
        refuse(len(shape) != 2 or 0 in shape, f"prompt of shape {shape}: expected [B, T >= 1]")
        low, high = int(idx.min()), int(idx.max())
        refuse(low < 0 or high >= V, f"prompt ids {low} to {high}: expected 0 to {V - 1}")
        refuse(max_new_tokens < 0, f"max_new_tokens={max_new_tokens}: expected 0 or more")
        refuse(not 0 <= temperature < inf, f"temperature={temperature}: expected 0 or more, finite")
        refuse(top_k is not None and top_k < 1, f"top_k={top_k}: expected 1 or more, None for all")

        context = idx[:, -block_size:]
        chunk = context                                         # what the cache has not seen yet
        cache = self.new_cache()
        for _ in range(max_new_tokens):
            if cache[0].length + chunk.size(1) > block_size:
                # The oldest entries cannot just be dropped: in deep layers others depend on them.
                context = context[:, -((block_size + 1) // 2):]
                chunk = context
                cache = self.new_cache()
            with torch.inference_mode():                        # no autograd: a token starts faster
                logits, _ = self(chunk, cache=cache)
                logits = logits[:, -1].float()                  # [B, V]
            if temperature == 0:
                chunk = logits.argmax(-1, keepdim=True)         # [B, 1]
            else:
                logits, ids = logits.topk(min(top_k or V, logits.size(-1)))     # likeliest first
                # No overflow, as none is above 0; no 0 / 0 at the smallest temperatures.
                logits = (logits - logits[:, :1]) / max(temperature, TINY)
                probs = F.softmax(logits, dim=-1)               # [B, top_k]
                chunk = ids.gather(1, torch.multinomial(probs, 1, generator=generator))     # [B, 1]
            context = torch.cat((context, chunk), dim=1)
            yield chunk.squeeze(1)

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """idx and its continuation, [B, T + max_new_tokens]. Arguments and errors: see stream."""
        tokens = self.stream(idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat([idx, *(token.unsqueeze(1) for token in tokens)], dim=1)

    def num_params(self) -> tuple[int, int]:
        """Parameters in total, and without the embedding table and the output head."""
        total = sum(p.numel() for p in self.parameters())
        outer = {self.embed.weight, self.W_head.weight}         # a set: it counts once if tied
        return total, total - sum(p.numel() for p in outer)

    def flops_per_token(self) -> int:
        """Training FLOPs per token at T = block_size, of matrix products alone.

        6 for each weight of a linear layer, 2 of them forward. 12 N d T for q kᵀ and A v, over
        the full square as is usual, though the causal mask needs only half of it.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        N, d, T = self.config.n_layer, self.config.n_embd, self.config.block_size
        return 6 * weights + 12 * N * d * T


class Cache:
    """One layer's keys and values so far: a plain transformer's cache, for anchors need none."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in T positions, k and v [B, T, h, d_h], and return all [B, P + T, h, d_h]."""
        if self.length == 0:                                    # room for all: no copying per token
            B, _, h, d_h = k.shape
            self.k = k.new_empty(B, self.block_size, h, d_h)
            self.v = v.new_empty(B, self.block_size, h, d_h)
        start = self.length
        self.length = start + k.size(1)
        self.k[:, start:self.length] = k
        self.v[:, start:self.length] = v
        return self.k[:, :self.length], self.v[:, :self.length]


# --- The checks of Config -------------------------------------------------------------------------
def check(config: Config) -> None:
    """Raises ValueError for a setting that cannot work; spells sets of components one way."""
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (int, float) if field.type is float else (field.type,)
        refuse(type(value) not in kinds, f"{field.name}={value!r}: expected {field.type.__name__}")
        if field.type is int and field.name != "anchor_layer":
            refuse(not 1 <= value <= 2**24, f"{field.name}={value}: expected 1 to {2**24}")
    theta, eps = config.rope_theta, config.norm_eps
    refuse(not 0 < theta <= 1e30, f"rope_theta={theta}: expected above 0, at most 1e30")
    refuse(not 0 <= eps <= 1, f"norm_eps={eps}: expected 0 to 1")
    for name in ("mix", "anchor_norm", "post_norm"):            # "GV" becomes "vg", "none" ""
        value = getattr(config, name)
        letters = "" if value == "none" else value.lower()
        refuse(not set(letters) <= set(COMPONENTS),
               f"{name}={value!r}: expected letters of {COMPONENTS!r}"
               + (", or 'none'" if name != "post_norm" else ""))
        in_order = "".join(s for s in COMPONENTS if s in letters)
        object.__setattr__(config, name, in_order)              # Config is frozen
    one_of("anchor", config.anchor, ("none", "internal", "exogenous"))
    one_of("granularity", config.granularity, ("scalar", "headwise", "elementwise"))
    one_of("post_norm", config.post_norm or "none", ("qk", "qkv", "qkvg"))
    sizes = f"n_embd={config.n_embd} with n_head={config.n_head}"
    refuse(config.n_embd % config.n_head != 0, f"{sizes}: make n_embd a multiple of n_head")
    refuse(config.d_h % 2 != 0, f"{sizes}: RoPE pairs channels, make n_embd / n_head even")
    anchor, k, N, mix = config.anchor, config.anchor_layer, config.n_layer, config.mix
    refuse(not 0 <= k < N, f"anchor_layer={k} with n_layer={N}: expected 0 (the embedding) or more,"
                           " and a layer behind it that mixes")
    refuse(k > 0 and anchor != "exogenous",
           f"anchor_layer={k} with anchor={anchor!r}: only exogenous ones read H_k, set 0")
    refuse(anchor == "internal" and N == 1,
           f"anchor='internal' with n_layer={N}: no layer mixes, add one")
    refuse(anchor == "none" and config.dynamic, "dynamic=True with anchor='none': set an anchor")
    refuse(anchor != "none" and mix == "", f"mix='none' with anchor={anchor!r}: name what to mix")
    no_g = "with gate=False: there is no g, set gate=True or drop the letter"
    refuse("g" in config.post_norm and not config.gate, f"post_norm={config.post_norm!r} {no_g}")
    refuse("g" in mix and anchor != "none" and not config.gate, f"mix={mix!r} {no_g}")


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)


def one_of(name: str, value: str, choices) -> None:
    message = f"{name}={value!r}: expected one of {', '.join(choices)}"
    for near in get_close_matches(value, choices, 1, cutoff=0.4):
        message += f", did you mean {near!r}?"
    refuse(value not in choices, message)
