"""One checkpoint on some tokens: our measurement against the same by transformers, each in a process of its own.

    python benchmarks/checkpoints.py FOLDER --tokens 512

Both read the folder, run the forward pass in float32 with eager attention, and compute of every layer the participation
ratios of queries and keys, attention entropy and the effective rank of Q K^T (ours computes the grid's other columns as
well). Reported are seconds from the open folder to the numbers, the first time and again, and peak memory above the imports.
Needs the extra `reference`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def peak() -> float:
    """The process's largest resident size so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(folder: str):
    import jax.numpy as jnp

    from qkgeom_jax import pretrained

    jnp.ones(1).block_until_ready()

    def run(ids):
        measured = pretrained.measure(pretrained.open_checkpoint(folder), ids)
        names = ("participation_ratio_q", "participation_ratio_k", "attention_entropy", "effective_rank_qk")
        return [[row[name] for name in names] for row in measured.rows], measured.loss

    return run


def theirs(folder: str):
    import torch
    import transformers
    from transformers.models.llama import modeling_llama

    def ratio(x):
        """x [T, K]"""
        covariance = torch.cov(x.T)
        return float(covariance.trace() ** 2 / (covariance**2).sum())

    def run(ids):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        rows, seen = [], {}
        rotate = modeling_llama.apply_rotary_pos_emb

        def watched(q, k, *rest, **options):
            seen["plain"], seen["rotated"] = (q, k), rotate(q, k, *rest, **options)
            return seen["rotated"]

        def after(module, inputs, outputs):
            (q, k), (rq, rk), p = seen["plain"], seen["rotated"], outputs[1]
            entropy = float(-(p * torch.where(p > 0, p, 1.0).log()).sum(-1).mean())
            core = [torch.linalg.qr(x[0])[1] for x in (rq, rk.repeat_interleave(q.shape[1] // k.shape[1], 1))]
            s = torch.linalg.svdvals(core[0] @ core[1].mT)
            s = s / s.sum(-1, keepdim=True)
            rank = float(torch.exp(-(s * s.clamp_min(1e-30).log()).sum(-1)).mean())
            ratios = [float(np.mean([ratio(head) for head in x[0]])) for x in (q, k)]
            rows.append([*ratios, entropy, rank])

        modeling_llama.apply_rotary_pos_emb = watched
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(after)
        try:
            with torch.no_grad():
                tokens = torch.tensor(ids, dtype=torch.long)
                loss = model(tokens, labels=tokens, use_cache=False).loss.item()
        finally:
            modeling_llama.apply_rotary_pos_emb = rotate
        return rows, loss

    return run


def child(which: str, folder: str, tokens: int) -> None:
    values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    run = {"ours": ours, "transformers": theirs}[which](folder)
    imported = peak()
    seconds = []
    for seed in (0, 1):
        ids = np.random.default_rng(seed).integers(0, values["vocab_size"], (1, tokens))
        start = time.perf_counter()
        rows, loss = run(ids)
        seconds.append(round(time.perf_counter() - start, 2))
    print(json.dumps({"seconds": seconds, "peak_mib": round(peak() - imported), "rows": rows, "loss": loss}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Llama checkpoint in the hub's layout")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given.child, given.folder, given.tokens)
    found = {}
    for which in ("transformers", "ours"):
        words = [sys.executable, __file__, given.folder, "--tokens", str(given.tokens), "--child", which]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found[which] = json.loads(done.stdout.splitlines()[-1])
        first, again = found[which]["seconds"]
        print(f"{which:13} {first:7.2f} s, again {again:7.2f} s, {found[which]['peak_mib']:6} MiB above the imports")
    difference = np.abs(np.array(found["ours"]["rows"]) / np.array(found["transformers"]["rows"]) - 1).max()
    losses = [found[which]["loss"] for which in found]
    print(f"largest relative difference of the four columns {difference:.1e}; losses {losses[0]:.5f}, {losses[1]:.5f}")


if __name__ == "__main__":
    main()
