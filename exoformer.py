"""
ExoFormer: a transformer whose layers mix their attention projections with anchors, computed once and read by all.

    Jonathan Su, "Attention Projection Mixing with Exogenous Anchors", ICML 2026, arXiv 2601.08131v4

Reads top to bottom: Config -> primitives -> anchors -> mixing -> attention -> feed-forward -> block -> model.

Shapes, everywhere: B batch, T positions, d = n_embd, h = n_head, d_h = d / h, N = n_layer, V = vocab_size; S is one of
q, k, v, g (query, key, value, gate logit). Layers count from 1; H_0 is the embedding output, H_n that of layer n.

    H_0    = Embed(tokens)                                          # no position information in it
    S_anc  = H_0 W_anc^S                                            # Anchor: once, for all layers
    S_n    = X_n W_n^S,  X_n = RMSNorm(H_{n-1})                     # the layer's own projections
    Ŝ_n    = λ^S_{n,1} ⊙ RMSNorm(S_anc) + λ^S_{n,2} ⊙ S_n           # Mixing: after projection
    q, k   = RoPE(RMSNorm(Q̂_n)), RoPE(RMSNorm(K̂_n))                 # QKNorm on the mixed q and k, then rotate
    U_n    = softmax(q kᵀ / √d_h + causal mask) V̂_n
    O_n    = concat_heads(U_n ⊙ σ(Ĝ_n)) W_n^O                       # Attention
    H'     = H_{n-1} + O_n
    H_n    = H' + SwiGLU(RMSNorm(H'))                               # Block
    logits = RMSNorm(H_N) W_head                                    # ExoFormer
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatch
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------------------
# Config: every system of the paper is one row of VARIANTS; every other setting is an axis any row can move along

VARIANTS: dict[str, dict] = {
    "base":              dict(gate=False, anchor="none"),
    "gated":             dict(gate=True,  anchor="none"),
    "resformer":         dict(gate=False, anchor="internal", mix="v", anchor_norm="none", granularity="scalar"),
    "gated-resformer":   dict(gate=True,  anchor="internal", mix="v", anchor_norm="none", granularity="scalar"),
    "nuresformer":       dict(gate=True,  anchor="internal"),       # from here on all of q k v g mix, elementwise,
    "exoformer":         dict(gate=True,  anchor="exogenous"),      # with normalised anchors: Config's defaults
    "exoformer-dynamic": dict(gate=True,  anchor="exogenous", dynamic=True),
}


@dataclass(frozen=True)
class Config:
    """Sizes and the axes of the design (§3). Raises ValueError, naming the value and the remedy, where it cannot work.

    Without an anchor `mix`, `granularity` and `anchor_norm` are ignored. Component sets are letters in any order.
    """
    vocab_size: int = 256               # V
    block_size: int = 256               # longest sequence of one forward, in tokens
    n_layer: int = 6                    # N
    n_head: int = 6                     # h
    n_embd: int = 384                   # d
    gate: bool = True                   # multiply the attention output by σ(Ĝ), channel by channel
    anchor: str = "exogenous"           # none | internal: layer 1's own projections | exogenous: matrices of their own
    anchor_layer: int = 0               # the k of the H_k that exogenous anchors read; layers k+1..N mix
    mix: str = "qkvg"                   # components that mix with their anchor
    granularity: str = "elementwise"    # weights λ per layer and component: scalar 2 | headwise 2h | elementwise 2d
    anchor_norm: str = "qkvg"           # anchors normalised before mixing (of those that mix), or none
    post_norm: str = "qk"               # components normalised after mixing, in every layer: qk | qkv | qkvg
    dynamic: bool = False               # a factor γ per token on every λ (§3.6)
    rope_theta: float = 500_000.0       # base θ of the rotary angles
    norm_eps: float = 1e-6              # ε of every RMSNorm

    def __post_init__(self):
        for f in fields(self):
            value, kinds = getattr(self, f.name), (int, float) if f.type is float else (f.type,)
            require(type(value) in kinds, f"{f.name}={value!r}: expected {f.type.__name__}")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: expected 1 or more")
        for name in ("mix", "anchor_norm", "post_norm"):        # "GV" -> "vg", "none" -> "": one spelling from here on
            value = getattr(self, name)
            letters = "" if value == "none" else value.lower()
            require(set(letters) <= set("qkvg"), f"{name}={value!r}: expected letters of 'qkvg', or 'none'")
            object.__setattr__(self, name, "".join(s for s in "qkvg" if s in letters))
        one_of("anchor", self.anchor, ("none", "internal", "exogenous"))
        one_of("granularity", self.granularity, ("scalar", "headwise", "elementwise"))
        one_of("post_norm", self.post_norm or "none", ("qk", "qkv", "qkvg"))

        k, N, d, h = self.anchor_layer, self.n_layer, self.n_embd, self.n_head
        require(d % h == 0, f"n_embd={d} with n_head={h}: heads share the width, make n_embd a multiple of n_head")
        require(d // h % 2 == 0, f"n_embd={d} with n_head={h}: RoPE pairs channels, make n_embd / n_head even")
        require(0 < self.rope_theta < float("inf"), f"rope_theta={self.rope_theta}: expected a positive number")
        require(0 <= self.norm_eps < float("inf"), f"norm_eps={self.norm_eps}: expected zero or more")
        require(k >= 0, f"anchor_layer={k}: expected 0 (the embedding) or more")
        require(k < N, f"anchor_layer={k} with n_layer={N}: no layer is left to mix, choose anchor_layer < n_layer")
        require(self.anchor == "exogenous" or k == 0, f"anchor_layer={k} with anchor={self.anchor!r}: only exogenous "
                                                      "anchors read an H_k, set anchor_layer=0")
        require(self.anchor != "internal" or N > 1, f"anchor='internal' with n_layer={N}: no layer mixes, add one")
        require(self.anchor != "none" or not self.dynamic, "dynamic=True with anchor='none': set an anchor")
        require(self.anchor == "none" or self.mix, f"mix='none' with anchor={self.anchor!r}: name what to mix")
        for name in ("post_norm",) if self.anchor == "none" else ("post_norm", "mix"):
            require(self.gate or "g" not in getattr(self, name),
                    f"{name}={getattr(self, name)!r} with gate=False: there is no g, set gate=True or drop the letter")

    @classmethod
    def variant(cls, name: str, **overrides) -> "Config":
        """The system `name` of VARIANTS with some fields changed. Raises ValueError for an unknown name of either."""
        one_of("variant", name, VARIANTS)
        for key in overrides:
            one_of("setting", key, [field.name for field in fields(cls)])
        return cls(**VARIANTS[name] | overrides)

    def mixes(self, layer: int) -> bool:
        """Whether this layer (1..N) mixes: not where its anchor does not exist yet, nor where it is the anchor."""
        return self.anchor != "none" and layer > (1 if self.anchor == "internal" else self.anchor_layer)


def require(ok, message: str) -> None:
    if not ok:
        raise ValueError(message)


def one_of(name: str, value: str, choices) -> None:
    near = get_close_matches(str(value), choices, 1, cutoff=0.4)
    require(value in choices, f"{name}={value!r}: expected one of {', '.join(choices)}"
                              + (f", did you mean {near[0]!r}?" if near else ""))


# ---------------------------------------------------------------------------------------------------------------------
# Primitives

class RMSNorm(nn.Module):
    """RMSNorm(s) = g ⊙ s / sqrt(mean(s²) + ε) over the last axis, of width `dim`."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, s: Tensor) -> Tensor:
        return F.rms_norm(s, self.weight.shape, self.weight.to(s.dtype), self.eps)  # the fused kernel wants one dtype


def rope_table(block_size: int, d_h: int, theta: float) -> Tensor:
    """(cos, cos) and (−sin, sin) of angle = position · θ^(−2i/d_h): [2, block_size, 1, d_h], computed in float64."""
    frequency = theta ** (-torch.arange(0, d_h, 2, dtype=torch.float64) / d_h)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), torch.cat((-frequency, frequency)))
    return torch.stack((angle.cos(), angle.sin())).unsqueeze(2).float()


def rope(s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (a, b) = (channel i, channel i + d_h/2) of s [B, T, h, d_h] by their position's angles."""
    # (a cos − b sin, b cos + a sin) = (a, b) ⊙ (cos, cos) + (b, a) ⊙ (−sin, sin)
    return torch.addcmul(s * cos, s.roll(s.size(-1) // 2, dims=-1), sin).type_as(s)


class Cache:
    """One layer's keys and values so far, [B, T, h, d_h] each: a plain transformer's cache, anchors need none."""

    def __init__(self, block_size: int):
        self.block_size, self.length = block_size, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.length == 0:                                            # room for all at once: no copying per token
            B, _, h, d_h = k.shape
            self.k, self.v = k.new_empty(B, self.block_size, h, d_h), v.new_empty(B, self.block_size, h, d_h)
        start, self.length = self.length, self.length + k.size(1)
        self.k[:, start:self.length], self.v[:, start:self.length] = k, v
        return self.k[:, :self.length], self.v[:, :self.length]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """U = softmax(q kᵀ / √d_h + causal mask) v, the T queries being the last of P + T keys: [B, T, h, d_h]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # [B, h, T or P + T, d_h]
    T, past = q.size(2), k.size(2) - q.size(2)
    # Behind a cache is_causal would be wrong: it lets query i see keys 0..i, not 0..past + i. A single one sees all.
    mask = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past) if past and T > 1 else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not past).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Anchors and mixing: {"q": ..., "k": ..., ...} holds the components, a ModuleDict with the same keys their weights

def project(proj: nn.ModuleDict, x: Tensor, h: int) -> dict[str, Tensor]:
    """S = x W^S for each component in proj, in heads: x [B, T, d] -> {s: [B, T, h, d_h]}."""
    return {s: W(x).unflatten(-1, (h, -1)) for s, W in proj.items()}


def normalise(norm: nn.ModuleDict, components: dict[str, Tensor]) -> dict[str, Tensor]:
    """RMSNorm(S) for each component in norm, the others as they are."""
    return {s: norm[s](c) if s in norm else c for s, c in components.items()}


class Anchor(nn.Module):
    """RMSNorm(S_anc) for the components that mix: computed once, read by every mixing layer (§3)."""

    def __init__(self, config: Config):
        super().__init__()
        d, self.h, norms = config.n_embd, config.n_head, (s for s in config.mix if s in config.anchor_norm)
        exogenous = config.mix if config.anchor == "exogenous" else ""
        self.proj = nn.ModuleDict({s: nn.Linear(d, d, bias=False) for s in exogenous})                  # W_anc^S
        self.norm = nn.ModuleDict({s: RMSNorm(d // self.h, config.norm_eps) for s in norms})            # for all layers

    def forward(self, source: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        # S_anc = H_k W_anc^S, k = 0 by default (exogenous), or layer 1's S_1 = X_1 W_1^S as they are (internal)
        anchors = project(self.proj, source, self.h) if self.proj else source           # {s: [B, T, h, d_h]}
        return normalise(self.norm, anchors)


class Mixing(nn.Module):
    """One layer's Ŝ_n from its own S_n and the anchors (Eq. 10; γ: §3.6), for the components that mix."""

    def __init__(self, config: Config):
        super().__init__()
        d, h, m = config.n_embd, config.n_head, len(config.mix)
        shape = {"scalar": (1, 1), "headwise": (h, 1), "elementwise": (h, d // h)}[config.granularity]  # meets [h, d_h]
        # pairs, because ParameterDict sorts the keys of a dict and γ comes in the order q k v g
        self.lam = nn.ParameterDict((s, nn.Parameter(torch.empty(2, *shape))) for s in config.mix)
        self.dynamic = config.dynamic
        if config.dynamic:
            self.W1 = nn.Linear(d, 16, bias=False)
            self.W2 = nn.Linear(16, 2 * m)                                          # with the only bias of the model, b

    def gamma(self, x: Tensor) -> tuple[Tensor, ...]:
        """γ = σ(GELU(X_n W1) W2 + b), in the order q1 q2 k1 k2 v1 v2 g1 g2: 2m tensors [B, T, 1, 1]."""
        u = self.W1(x)                                                              # [B, T, 16]
        u = u * torch.special.ndtr(u)   # GELU(u) = u Φ(u): on a single token F.gelu's own start takes longer than this
        return self.W2(u).sigmoid()[..., None, None].unbind(2)

    def forward(self, x: Tensor, own: dict[str, Tensor], anchors: dict[str, Tensor]) -> dict[str, Tensor]:
        gamma = self.gamma(x) if self.dynamic else ()
        mixed = dict(own)
        for i, (s, lam) in enumerate(self.lam.items()):
            lam1, lam2 = lam.to(own[s].dtype).unbind()                              # [1 or h, 1 or d_h]
            anchor, current = anchors[s], own[s]                                    # [B, T, h, d_h]
            # Ŝ_n = (λ1 γ1) ⊙ RMSNorm(S_anc) + (λ2 γ2) ⊙ S_n
            if self.dynamic:
                anchor, current = gamma[2 * i] * anchor, gamma[2 * i + 1] * current
            mixed[s] = torch.addcmul(lam2 * current, lam1, anchor)                  # = lam2 * current + lam1 * anchor
        return mixed


# ---------------------------------------------------------------------------------------------------------------------
# Layers

class Attention(nn.Module):
    """Causal attention on mixed projections, its output gated channel by channel."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        d, self.h, d_h = config.n_embd, config.n_head, config.n_embd // config.n_head
        self.proj = nn.ModuleDict({s: nn.Linear(d, d, bias=False) for s in ("qkvg" if config.gate else "qkv")})  # W_n^S
        self.mix = Mixing(config) if config.mixes(layer) else None
        self.norm = nn.ModuleDict({s: RMSNorm(d_h, config.norm_eps) for s in config.post_norm})         # QKNorm or more
        self.out = nn.Linear(d, d, bias=False)                                                          # W_n^O

    def forward(self, x: Tensor, anchors: dict | None, cos_sin: tuple, cache: Cache | None) -> tuple[Tensor, dict]:
        own = project(self.proj, x, self.h)                                                 # S_n  {s: [B, T, h, d_h]}
        mixed = self.mix(x, own, anchors) if self.mix else own                              # Ŝ_n
        mixed = normalise(self.norm, mixed)
        q, k, v = rope(mixed["q"], *cos_sin), rope(mixed["k"], *cos_sin), mixed["v"]
        u = attend(q, *(cache.append(k, v) if cache else (k, v)))                           # U_n  [B, T, h, d_h]
        if "g" in mixed:
            u = u * mixed["g"].sigmoid()                                                    # U_n ⊙ σ(Ĝ_n)
        return self.out(u.flatten(2)), own                                                  # O_n  [B, T, d]


class SwiGLU(nn.Module):
    """W_down( silu(W_gate z) ⊙ (W_up z) ), hidden width 2d: 6d² weights."""

    def __init__(self, config: Config):
        super().__init__()
        d = config.n_embd
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(z)) * self.up(z))


class Block(nn.Module):
    """Layer n: H_{n-1} -> H_n, and the raw projections S_n, which an internal anchor takes from layer 1."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(config.n_embd, config.norm_eps), Attention(config, layer)
        self.mlp_norm, self.mlp = RMSNorm(config.n_embd, config.norm_eps), SwiGLU(config)

    def forward(self, h: Tensor, anchors: dict | None, cos_sin: tuple, cache: Cache | None) -> tuple[Tensor, dict]:
        o, own = self.attn(self.attn_norm(h), anchors, cos_sin, cache)
        h = h + o                                                                           # H' = H_{n-1} + O_n
        return h + self.mlp(self.mlp_norm(h)), own                                          # H_n [B, T, d]


# ---------------------------------------------------------------------------------------------------------------------
# The model

class ExoFormer(nn.Module):
    """The language model of `config`, freshly initialised from the global seed (`torch.manual_seed`)."""

    def __init__(self, config: Config):
        super().__init__()
        seed = int(torch.randint(2**32, (), device="cpu"))      # drawn first: the layers below draw too
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.anchor = Anchor(config) if config.anchor != "none" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(1, config.n_layer + 1))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        table = rope_table(config.block_size, config.n_embd // config.n_head, config.rope_theta)
        self.register_buffer("rope", table, persistent=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Every initialisation of the model. Raises ValueError for a parameter that not exactly one row covers.

        Each parameter draws from its own generator, seeded by its name, so that one seed gives parameters of the same
        name the same start in every variant; only λ, a constant, is 1 in dynamic and 0.5 in static models.
        """
        table = {
            "*norm*.weight":  1.0,                                          # all gains
            "*.lam.*":        1.0 if self.config.dynamic else 0.5,          # γ starts at 0.5, so λ γ = 0.5 in both
            "*.W2.*":         0.0,                                          # W2 = b = 0: γ = σ(0) = 0.5
            "*.out.weight":   0.0,                                          # layers and logits start as zero
            "*.down.weight":  0.0,
            "head.weight":    0.0,
            "embed.weight":   "normal", "*.proj.?.weight": "normal", "*.W1.weight": "normal",
            "*.gate.weight":  "normal", "*.up.weight":     "normal",
        }
        for name, p in self.named_parameters():
            rows = [value for pattern, value in table.items() if fnmatch(name, pattern)]
            if len(rows) != 1:
                raise ValueError(f"parameter {name!r} matches {len(rows)} rows of init_weights: expected one")
            if rows[0] == "normal":
                generator = torch.Generator().manual_seed((seed + crc32(name.encode())) % 2**32)
                w = torch.empty(p.shape, device="cpu")                      # one generator, one result on every device
                p.copy_(nn.init.trunc_normal_(w, std=0.02, a=-0.06, b=0.06, generator=generator))
            else:
                p.fill_(rows[0])

    def _apply(self, fn, recurse=True):
        table = self.rope                                       # .to(), .bfloat16(), .cuda(): all come through here
        super()._apply(fn, recurse)
        self.rope = table.to(self.rope.device)                  # moved, never rounded: bfloat16 angles collide past 256
        return self

    def forward(self, idx: Tensor, targets: Tensor | None = None,
                cache: list[Cache] | None = None) -> tuple[Tensor, Tensor | None]:
        """Next-token logits [B, T, V] for idx, int64 [B, T], with `targets` [B, T] also the mean cross-entropy in nats.

        `cache` (from `new_cache`) holds the positions before idx and takes these in. Raises ValueError for a sequence
        longer than block_size and for targets of another shape. Ids must lie in [0, V): that is checked where they
        enter, by `generate` and the data loader, because a look at them here would make a GPU wait.
        """
        past = cache[0].length if cache else 0
        if past + idx.size(1) > self.config.block_size:
            raise ValueError(f"{past + idx.size(1)} tokens: expected at most block_size={self.config.block_size}, "
                             "cut the sequence or build a model with a larger block_size")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets of shape {list(targets.shape)}: expected idx's shape {list(idx.shape)}")

        cos_sin = self.rope[:, past:past + idx.size(1)].unbind()                            # [T, 1, d_h] each
        h, anchors = self.embed(idx), None                                                  # H_0 [B, T, d]
        for n, block in enumerate(self.blocks):                                             # h is H_n here
            if self.config.anchor == "exogenous" and n == self.config.anchor_layer:
                anchors = self.anchor(h)
            h, own = block(h, anchors, cos_sin, cache[n] if cache else None)
            if self.config.anchor == "internal" and n == 0:
                anchors = self.anchor(own)
        logits = self.head(self.norm(h))                                                    # [B, T, V]
        if targets is None:
            return logits, None
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))                 # bfloat16 is too coarse
        return logits, F.cross_entropy(exact.flatten(0, 1), targets.flatten())

    def new_cache(self) -> list[Cache]:
        """An empty cache for `forward` without gradients: one entry a layer, for one batch in chunks of any length."""
        return [Cache(self.config.block_size) for _ in self.blocks]

    def stream(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
               generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Continue idx, int64 [B, T], yielding each new token [B] as it is drawn.

        Draws from softmax(logits / temperature), of the `top_k` likeliest tokens if given (clamped to V); temperature 0
        takes the likeliest. `generator` lives on the model's device. A prompt longer than block_size is cut to its last
        block_size tokens; whenever the context is full the model starts again from the last half of it, so that it sees
        between half a block and a block. Raises ValueError, at the first token, for arguments that mean nothing.
        """
        V, block_size = self.config.vocab_size, self.config.block_size
        require(idx.ndim == 2 and idx.numel(), f"prompt of shape {list(idx.shape)}: expected [B, T] with T >= 1")
        low, high = int(idx.min()), int(idx.max())
        require(0 <= low and high < V, f"prompt ids {low} to {high}: expected 0 to vocab_size - 1 = {V - 1}")
        require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}: expected 0 or more")
        require(0 <= temperature < float("inf"), f"temperature={temperature}: expected 0 (greedy) or more, and finite")
        require(top_k is None or top_k >= 1, f"top_k={top_k}: expected 1 or more, or None for the whole vocabulary")

        cache, chunk = self.new_cache(), idx[:, -block_size:]           # chunk: what the cache has not seen
        context = chunk
        for _ in range(max_new_tokens):
            if cache[0].length + chunk.size(1) > block_size:        # full. Dropping the oldest entries would not do:
                context = context[:, -((block_size + 1) // 2):]     # later ones, in deep layers, depend on them
                cache, chunk = self.new_cache(), context
            with torch.inference_mode():    # a token's many small kernels start faster without autograd's bookkeeping;
                logits = self(chunk, cache=cache)[0][:, -1].float()     # [B, V], the tokens drawn stay ordinary tensors
            if temperature == 0:
                chunk = logits.argmax(-1, keepdim=True)                                     # [B, 1]
            else:
                logits, ids = logits.topk(min(top_k or V, V))                               # [B, k], likeliest first
                probs = F.softmax((logits - logits[:, :1]) / temperature, dim=-1)           # of <= 0: no overflow
                chunk = ids.gather(1, torch.multinomial(probs, 1, generator=generator))     # [B, 1]
            context = torch.cat((context, chunk), dim=1)
            yield chunk.squeeze(1)

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None) -> Tensor:
        """idx with `max_new_tokens` new tokens behind it, int64 [B, T + new]. Arguments and errors as for `stream`."""
        new = self.stream(idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat((idx, *(token.unsqueeze(1) for token in new)), dim=1)

    def num_params(self) -> tuple[int, int]:
        """Parameters in total, and without the embedding table and the output head."""
        total = sum(p.numel() for p in self.parameters())
        return total, total - self.embed.weight.numel() - self.head.weight.numel()

    def flops_per_token(self) -> int:
        """Training FLOPs per token at T = block_size: matrix products only, forward and backward.

        6 for every weight of a matrix (2 forward, 4 backward; the head and the anchors included, the embedding look-up
        not) and 12 N d T for q kᵀ and A v, counted over the full square as is usual though the mask needs only half.
        """
        matrices = sum(p.numel() for p in self.parameters() if p.ndim == 2) - self.embed.weight.numel()
        return 6 * matrices + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
