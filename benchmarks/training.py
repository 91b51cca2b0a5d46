"""Training speed against the same model in PyTorch, and what an evaluation costs beside an epoch.

    pip install -e '.[reference]' && python benchmarks/training.py

PyTorch: eager, scaled_dot_product_attention, fused AdamW, seeds in turn; ours: all seeds in one program. The two take
turns, and each figure is the median over rounds; only ratios within one run mean anything on a shared machine. Before
timing, both must give the same loss for the same parameters and tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from qkgeom_jax import ensemble, evaluate, model, optim  # noqa: E402
from qkgeom_jax.config import PRESETS, Config, override  # noqa: E402


def make_peer(config: Config, params: dict):
    """The same model in PyTorch, with one seed's parameters."""
    import torch
    from torch import nn
    from torch.nn import functional

    c = config.model

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
            self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
            self.output = nn.Linear(c.width, c.width, bias=False)
            self.mlp_in, self.mlp_out = nn.Linear(c.width, c.hidden), nn.Linear(c.hidden, c.width)

        def forward(self, x):
            q, k, v = (
                y.view(*x.shape[:2], c.heads, c.head_width).transpose(1, 2) for y in self.qkv(self.norm_1(x)).split(c.width, -1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.mlp_out(functional.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh"))

    class Peer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
            self.blocks = nn.ModuleList(Block() for _ in range(c.depth))
            self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)

        def forward(self, tokens):
            x = self.token(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    peer = Peer()
    p = jax.tree.map(lambda a: torch.from_numpy(np.array(a)), params)
    with torch.no_grad():
        peer.token.weight.copy_(p["token_embedding"])
        peer.position.weight.copy_(p["position_embedding"])
        peer.head.weight.copy_(p["head"].T)
        for i, block in enumerate(peer.blocks):
            attention, mlp = p["blocks"]["attention"], p["blocks"]["mlp"]
            block.qkv.weight.copy_(torch.cat([attention[n][i].T for n in ("query", "key", "value")]))
            block.output.weight.copy_(attention["output"][i].T)
            block.mlp_in.weight.copy_(mlp["input"][i].T)
            block.mlp_out.weight.copy_(mlp["output"][i].T)
            block.mlp_in.bias.copy_(mlp["input_bias"][i])
            block.mlp_out.bias.copy_(mlp["output_bias"][i])
    return peer


def peer_runner(config: Config, params: dict, batches: np.ndarray):
    """A function that makes one step of every seed, in turn; checked to compute our loss first."""
    import torch

    peers, optimizers, data = [], [], torch.from_numpy(batches).long()
    for seed in range(len(config.seeds)):
        own = jax.tree.map(lambda a: a[seed], params)
        peer = make_peer(config, own)
        ours = float(jax.jit(model.cross_entropy, static_argnums=2)(own, jnp.asarray(batches[seed]), config.model))
        theirs = float(peer(data[seed]).detach())
        if abs(ours - theirs) > 1e-4:
            raise SystemExit(f"the peer's loss is {theirs}, ours {ours}: not the same model")
        decayed = [p for p in peer.parameters() if p.ndim >= 2]
        rest = [p for p in peer.parameters() if p.ndim < 2]
        o = config.optimizer
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta_1, o.beta_2), fused=True))
        peers.append(peer)

    def step() -> None:
        for peer, optimizer, tokens in zip(peers, optimizers, data, strict=True):
            optimizer.zero_grad(set_to_none=True)
            peer(tokens).backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), config.optimizer.gradient_clip)
            optimizer.step()

    return step


def clocked(function, repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def compare(depth: int, rounds: int, steps: int, with_peer: bool) -> None:
    config = override(PRESETS["laptop"], depth=depth, vocabulary=200, steps_per_epoch=steps, chunk=steps)
    t = config.training
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, 100_000).astype(np.uint8)
    programs, keys = ensemble.make_ensemble(config, optim.make_optimizer(config)), ensemble.make_keys(config.seeds)
    held = {"state": programs.initialise(keys)}
    params = jax.tree.map(np.asarray, held["state"].params)
    device_tokens, probes = jnp.asarray(tokens), evaluate.make_probes(tokens, tokens, config)

    def chunk() -> None:
        held["state"] = jax.block_until_ready(programs.advance(held["state"], keys, jnp.int32(0), device_tokens))

    def measure() -> None:
        jax.block_until_ready(programs.measure(held["state"].params, probes))

    compile_chunk, compile_measure = clocked(chunk), clocked(measure)
    peer = None
    if with_peer:
        batches = rng.integers(0, 200, (len(config.seeds), t.batch, config.model.context + 1))
        peer = peer_runner(config, params, batches)
        peer()
    ours, theirs, evaluation = [], [], []
    for _ in range(rounds):
        ours.append(clocked(chunk) / steps)
        evaluation.append(clocked(measure))
        if peer:
            theirs.append(clocked(peer, steps))
    characters = len(config.seeds) * t.batch * config.model.context
    step = statistics.median(ours)
    epoch = PRESETS["laptop"].training.steps_per_epoch * step
    line = f"depth {depth}: ours {characters / step:,.0f} characters/s"
    if peer:
        ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        line += f", PyTorch {characters / statistics.median(theirs):,.0f}; ours/PyTorch {statistics.median(ratios):.2f}"
        line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    share = statistics.median(e / (PRESETS["laptop"].training.steps_per_epoch * s) for e, s in zip(evaluation, ours, strict=True))
    print(line)
    print(
        f"  evaluation {statistics.median(evaluation):.2f} s, {share:.1%} of a laptop epoch's training ({epoch:.0f} s); "
        f"first chunk {compile_chunk:.1f} s and first evaluation {compile_measure:.1f} s, compilation included",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--depths", default="4,6,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="training steps in a round")
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch out")
    options = parser.parse_args()
    for depth in map(int, options.depths.split(",")):
        compare(depth, options.rounds, options.steps, not options.no_peer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
