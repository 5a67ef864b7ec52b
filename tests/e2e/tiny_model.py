"""Write the tiny random Llama, its tokenizer and a LoRA adapter that the end-to-end tests serve.

A model whose weights are real files on disk, small enough that vLLM's start is all imports, and
random enough that every token of the context changes the next one: a wrong, shifted or stale
chunk of KV shows in the log-probabilities at once. Its four KV heads allow tensor parallel 2.
Called by the fixtures (once a session, into a folder that survives) and from the command line:
`python -m tests.e2e.tiny_model FOLDER`. Needs torch and safetensors, which vLLM brings.
"""

import fcntl
import json
import sys
from pathlib import Path

__all__ = [
    "ADAPTER",
    "KV_BYTES_A_TOKEN",
    "OTHER",
    "OTHER_ADAPTER",
    "VOCABULARY",
    "make_tiny_models",
]

VOCABULARY = 1024
LAYERS = 3
HIDDEN = 128
HEADS = 4
HEAD_SIZE = 32
POSITIONS = 8192
KV_BYTES_A_TOKEN = 2 * LAYERS * HEADS * HEAD_SIZE * 4
"""Bytes of KV that one token weighs in float32, over all ranks."""

OTHER = "other"
"""Folder beside the model: the same configuration with other weights (a 'fine-tune')."""
ADAPTER = "adapter"
"""Folder beside the model: a LoRA adapter of rank 8 for the attention's projections."""
OTHER_ADAPTER = "other_adapter"
"""Folder beside the model: an adapter of the same shape with other weights."""

_FORMAT = 4  # Raised whenever the files' content changes, so that an old folder is made anew.


def make_tiny_models(folder: Path) -> Path:
    """Make `folder/model`, `folder/other` and `folder/adapter` unless they are there.

    Args:
        folder: created when missing; a folder of an older format is overwritten in place.

    Returns:
        The path of the model. Takes half a second, plus torch's import.
    """
    stamp = folder / "format"
    folder.mkdir(parents=True, exist_ok=True)
    # Another process of the tests may be about to do the same.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != str(_FORMAT):
            _write_model(folder / "model", 1)
            _write_model(folder / OTHER, 2)
            _write_adapter(folder / ADAPTER, 3)
            _write_adapter(folder / OTHER_ADAPTER, 4)
            stamp.write_text(str(_FORMAT))
    return folder / "model"


def _write_model(folder: Path, seed: int) -> None:
    """Write configuration, tokenizer and weights of one tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> "torch.Tensor":
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        # Queries and keys are scaled up, else attention is an average in which one token drowns.
        weights[f"{name}.self_attn.q_proj.weight"] = matrix(HEADS * HEAD_SIZE, HIDDEN, 2.0)
        weights[f"{name}.self_attn.k_proj.weight"] = matrix(HEADS * HEAD_SIZE, HIDDEN, 2.0)
        weights[f"{name}.self_attn.v_proj.weight"] = matrix(HEADS * HEAD_SIZE, HIDDEN)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_SIZE, 2.0)
        weights[f"{name}.mlp.gate_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        weights[f"{name}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = matrix(VOCABULARY, HIDDEN, 3.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_model_config(), indent=1))
    _write_tokenizer(folder)


def _model_config() -> dict[str, object]:
    """Say what a Hugging Face `config.json` says of the tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer in which token 17 is the text `t17`."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t1",
        "eos_token": "t2",
        "unk_token": "t0",
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter in PEFT's format, strong enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    rank = 8
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    weights = {}
    for layer in range(LAYERS):
        for projection in projections:
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            down = torch.randn(rank, HIDDEN, generator=generator)
            up = torch.randn(HEADS * HEAD_SIZE, rank, generator=generator)
            weights[f"{name}.lora_A.weight"] = down / HIDDEN**0.5
            weights[f"{name}.lora_B.weight"] = up / rank**0.5
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": projections,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    make_tiny_models(Path(sys.argv[1]))
