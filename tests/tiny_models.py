"""Small random checkpoints of the three families, as files of a repository; training is a random walk."""

import json

import numpy as np

LAYERS, WIDTH, VOCABULARY, CONTEXT = 2, 24, 50, 64
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"


def tokenizer() -> bytes:
    """A letter a token, 1 for any other."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ids = {"<pad>": 0, "<unk>": 1} | {letter: at + 2 for at, letter in enumerate(LETTERS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return words.to_str().encode()


def gpt2():
    """Shapes and config.json of GPT-2."""
    shapes = {
        "wte.weight": (VOCABULARY, WIDTH),
        "wpe.weight": (CONTEXT, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        at = f"h.{layer}."
        shapes |= {f"{at}ln_{n}.{part}": (WIDTH,) for n in (1, 2) for part in ("weight", "bias")}
        for name, rows, columns in (
            ("attn.c_attn", WIDTH, 3 * WIDTH), ("attn.c_proj", WIDTH, WIDTH), ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):  # fmt: skip
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (columns,)}
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": LAYERS, "n_head": 3, "n_embd": WIDTH,
        "n_positions": CONTEXT, "n_ctx": CONTEXT, "vocab_size": VOCABULARY, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new", "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
    }  # fmt: skip
    return shapes, config


def gpt_neox():
    """Shapes and config.json of GPT-NeoX, rotary 0.25 and parallel residual as in Pythia."""
    shapes = {
        "gpt_neox.embed_in.weight": (VOCABULARY, WIDTH), "embed_out.weight": (VOCABULARY, WIDTH),
        "gpt_neox.final_layer_norm.weight": (WIDTH,), "gpt_neox.final_layer_norm.bias": (WIDTH,),
    }  # fmt: skip
    for layer in range(LAYERS):
        at = f"gpt_neox.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
        for name, rows, columns in (
            ("attention.query_key_value", 3 * WIDTH, WIDTH), ("attention.dense", WIDTH, WIDTH),
            ("mlp.dense_h_to_4h", 4 * WIDTH, WIDTH), ("mlp.dense_4h_to_h", WIDTH, 4 * WIDTH),
        ):  # fmt: skip
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
    config = {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": LAYERS,
        "num_attention_heads": 3, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY, "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True,
        "layer_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    return shapes, config


def llama():
    """Shapes and config.json of Llama with grouped heads: 6 query heads and 2 key heads of 4."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows, columns in (
            ("self_attn.q_proj", WIDTH, WIDTH), ("self_attn.k_proj", 8, WIDTH), ("self_attn.v_proj", 8, WIDTH),
            ("self_attn.o_proj", WIDTH, WIDTH), ("mlp.gate_proj", 48, WIDTH), ("mlp.up_proj", 48, WIDTH),
            ("mlp.down_proj", WIDTH, 48),
        ):  # fmt: skip
            shapes[f"{at}{name}.weight"] = (rows, columns)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 4, "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    return shapes, config


def walk(family, revisions: int, seed: int) -> list[dict[str, np.ndarray]]:
    """The tensors of each revision: norms about 1, everything else small, each a step on from the last."""
    rng = np.random.default_rng(seed)
    shapes, _ = family()
    place, path = {}, []
    for name, shape in shapes.items():
        norm = "norm" in name or ".ln_" in name or name.startswith("ln_")
        place[name] = rng.normal(1.0 if norm and name.endswith("weight") else 0.0, 0.2, shape)
    for _ in range(revisions):
        path.append({name: value.astype(np.float32) for name, value in place.items()})
        place = {name: value + rng.normal(0, 0.08, value.shape) for name, value in place.items()}
    return path


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The format by its description: a length, a JSON header, the bytes of all tensors."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors.items():
        assert value.dtype == np.float32
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, start + value.nbytes]}
        start += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values())


def files(family, tensors, *, words: bool = True) -> dict[str, bytes]:
    """A revision's files."""
    found = {
        "config.json": json.dumps(family()[1]).encode(),
        "model.safetensors": safetensors(tensors),
        "README.md": b"unneeded",
    }
    return found | ({"tokenizer.json": tokenizer()} if words else {})
