"""Random tiny models of every kind, for the end-to-end tests of what is kept and what is refused.

One table from a kind's name to its Hugging Face configuration. The weights are real files, made by
transformers' own classes and then drawn anew, so that the names are right and every token of the
context changes the next one (vLLM's dummy weights are so small that all tokens are equally likely,
and a wrong KV would not show). Written once, into a folder that survives: `python -m
tests.e2e.model_kinds FOLDER`, in a process without vLLM, beside which transformers' classes fail.
"""

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "are_written"]

_FORMAT = "3"  # Raised whenever the files' content changes, so that old folders are made anew.
_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}


def _kind(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    fields = {**_COMMON, "architectures": [architecture], "model_type": model_type, **own}
    return {name: value for name, value in fields.items() if value is not None}


def _chunked(**own: Any) -> dict[str, Any]:
    return _kind(
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        interleave_moe_layer_step=8,
        intermediate_size_mlp=256,
        num_local_experts=2,
        attn_temperature_tuning=False,
        use_qk_norm=False,
        **own,
    )


_WINDOW = "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "gqa": _kind("LlamaForCausalLM", "llama"),
    # Several KV groups: vLLM's Llama reads what Gemma's and gpt-oss's configurations say.
    "windows": _kind(
        "LlamaForCausalLM",
        "llama",
        num_hidden_layers=4,
        sliding_window=96,
        layer_types=[_WINDOW, "full_attention", _WINDOW, _WINDOW],
    ),
    "chunked": _chunked(attention_chunk_size=256),
    "chunked-widely": _chunked(attention_chunk_size=768),
    "recurrent": _kind(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
        full_attention_interval=4,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    # The last two layers use the KV of those before them.
    "sharing": _kind(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 6,
        intermediate_size=[256] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=1024,
        laurel_rank=8,
        altup_num_inputs=2,
        altup_active_idx=0,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
}


def are_written(folder: Path) -> bool:
    """Return whether every kind's model is below `folder` as this module writes it."""
    stamps = [folder / name / "format" for name in KINDS]
    return all(stamp.exists() and stamp.read_text() == _FORMAT for stamp in stamps)


def _write(name: str, folder: Path) -> None:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(KINDS[name]))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    is_tied = KINDS[name]["tie_word_embeddings"]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight, values in model.named_parameters():
            if values.ndim >= 2 and "conv" not in weight:
                scale = _scale(weight, values.shape[-1], is_tied=is_tied)
                values.normal_(0, scale, generator=generator)
    model.save_pretrained(path)
    (path / "format").write_text(_FORMAT)


def _scale(weight: str, columns: int, *, is_tied: bool) -> float:
    if "embed" in weight:
        # What comes out is compared with it as well: large ones would repeat the last token.
        return 0.2 if is_tied else 1.0
    # Queries and keys are scaled up, else attention is an average in which one token drowns.
    gain = 2.0 if any(part in weight for part in ("q_", "k_", "o_proj", "kv_b")) else 1.0
    return (3.0 if "lm_head" in weight else gain) / columns**0.5


if __name__ == "__main__":
    for kind in KINDS:
        _write(kind, Path(sys.argv[1]))
