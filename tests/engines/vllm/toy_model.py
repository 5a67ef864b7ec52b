"""A model without arithmetic whose KV shows at once what it was computed from.

The KV of a position is a number that depends on every token up to it and, by factors, on the
rank and the KV group; the next token depends on the last position's number. So a block that holds
anything but the KV of exactly these tokens is seen when it is read, and a wrong answer shows as
another token.
"""

import json

import numpy as np

VOCABULARY = 997
PRIME = 2_147_483_647
RANK_FACTOR = 1 << 32
GROUP_FACTOR = 1 << 48
LAYER = "model.layers.0.self_attn.attn"


def kv_of(token_ids, *, rank=0, group=0, before=0):
    """Return the KV of consecutive positions, int64; `before` is the one before, of rank 0."""
    values = np.empty(len(token_ids), dtype=np.int64)
    for index, token in enumerate(token_ids):
        before = (before * 48_271 + token + 1) % PRIME
        values[index] = before
    return values + rank * RANK_FACTOR + group * GROUP_FACTOR


def next_token(kv):
    return int(kv) % RANK_FACTOR * 31 % VOCABULARY


def answer(prompt, token_count):
    """Return what the model says after a prompt."""
    state = int(kv_of(prompt)[-1])
    said = []
    for _ in range(token_count):
        said.append(next_token(state))
        state = int(kv_of(said[-1:], before=state)[0])
    return said


def write_model(folder, *, seed=0, **overrides):
    """Write a model folder that vLLM's configuration takes; its weights are a few random bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["ToyForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(seed).bytes(40_000)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def register_model():
    """Make the architecture known in this process, without vLLM's look at it from another one."""
    from torch import nn
    from vllm.model_executor.models import ModelRegistry

    class ToyForCausalLM(nn.Module):
        def __init__(self, vllm_config, prefix=""):
            super().__init__()

        def embed_input_ids(self, input_ids):
            raise NotImplementedError

        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            raise NotImplementedError

        def compute_logits(self, hidden_states):
            raise NotImplementedError

    ModelRegistry.register_model("ToyForCausalLM", ToyForCausalLM)
