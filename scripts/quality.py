#!/usr/bin/env python3
"""Say what int8 chunks do to a real model's answers: `make quality`.

A context is prefilled in one go, and its KV is what every other row is compared with: the KV of
the same context prefilled in pieces (an engine splits as its batch allows), the KV computed in
float32 and rounded (what bf16 arithmetic itself costs), the KV that went through `--l1-codec int8`
(the very kernels, on a CPU under Triton's interpreter), and the KV as plain fp8 e4m3. Behind each
the model reads the same tokens twice over: how the text goes on, and a passage of the context once
more, which needs attention to look up exact places.

Every operation's result is bf16, as in an engine. Products are added up in float32, as a GPU does;
where there is none, float32 weights do it, for bf16 products of older CPUs are ten times slower.
The texts are English that `make setup` installs: Newton's Opticks (a test file of a library) and
the language reference of Python (`pydoc_data.topics`); `--text FILE` takes others.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Triton decides when it is imported whether it interprets.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TRITON_INTERPRET="01"[not Path("/dev/nvidiactl").exists()],
)

import numpy as np
import torch
import transformers

from kvcellar.engines import kernels_int8
from kvcellar.engines.copy_gpu import open_gpu_copier
from kvcellar.engines.pages import PageRun
from kvcellar.layout.shard import EXACT_TOKENS, INT8, Vectors

MODEL = Path(__file__).resolve().parent.parent / ".stack" / "model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_TOKENS, CHUNK_BLOCKS = 256, 1
"""A chunk is one block: the bytes of a vector do not depend on where a page ends."""
PIECE_TOKENS = 512
"""Of the other prefill."""
FP8_MAX = 448.0
TASKS = ("continue", "copy")
SETTLING_TOKENS = 16
"""Of a copied passage that do not count: the model cannot know yet that it is a copy."""

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""For each layer keys and values, bf16, shape [1, heads, tokens, elements]."""


class Float32Linear(torch.nn.Module):
    """A linear layer that adds up in float32 and rounds its result to bf16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Take over a layer without bias."""
        super().__init__()
        assert linear.bias is None
        self.weight = linear.weight.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.nn.functional.linear(x.float(), self.weight).to(torch.bfloat16)


class Model:
    """The model and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Load them from a folder."""
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.net = load(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval().to(DEVICE)
        self.exact = load(folder, dtype=torch.float32, attn_implementation="sdpa").eval().to(DEVICE)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if DEVICE == "cpu":
            _add_up_in_float32(self.net)
            # The interpreter takes as long for a small program as for a large one.
            kernels_int8.VECTORS_AT_ONCE = 2048

    def tokens(self, text: str) -> torch.Tensor:
        """Return a text's token ids."""
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return ids.to(DEVICE)

    def prefill(self, context: torch.Tensor, *, piece_tokens: int) -> KV:
        """Return the KV of a context, computed in pieces."""
        cache = transformers.DynamicCache()
        for piece in context.split(piece_tokens):
            self.net(piece[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def prefill_in_float32(self, context: torch.Tensor) -> KV:
        """Return the KV of a context, computed in float32 and rounded to bf16 at the end."""
        cache = transformers.DynamicCache()
        self.exact(context[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        return [(keys.to(torch.bfloat16), values.to(torch.bfloat16)) for keys, values in kv]

    def read(self, kv: KV, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities after each of `tokens`, float32, behind a context's KV."""
        cache = transformers.DynamicCache()
        for index, (keys, values) in enumerate(kv):
            cache.update(keys, values, index)
        logits = self.net(tokens[None], past_key_values=cache, use_cache=True).logits[0]
        return logits.float().log_softmax(-1)


def _add_up_in_float32(module: torch.nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, Float32Linear(child))
        else:
            _add_up_in_float32(child)


def through_int8(kv: KV) -> KV:
    """Return a context's KV after a store and a load in the int8 form.

    The pages are vLLM's: [block, K or V, token, head, element] for each layer.
    """
    heads, tokens, elements = kv[0][0].shape[1:]
    assert tokens % (BLOCK_TOKENS * CHUNK_BLOCKS) == 0, tokens
    blocks = tokens // BLOCK_TOKENS
    pages = []
    for keys, values in kv:
        both = torch.stack([keys[0], values[0]]).transpose(1, 2)
        split = both.reshape(2, blocks, BLOCK_TOKENS, heads, elements)
        pages.append(split.transpose(0, 1).contiguous())
    page_bytes = pages[0][0].numel() * 2
    device = f"{DEVICE}:0" if DEVICE == "cuda" else DEVICE
    runs = [
        PageRun(
            (f"layer.{index}",), each.untyped_storage(), device, 0, page_bytes, page_bytes, blocks
        )
        for index, each in enumerate(pages)
    ]
    vectors = Vectors("bfloat16", elements, heads, 2 * BLOCK_TOKENS * heads)
    copier = open_gpu_copier(runs, vectors=vectors, block_tokens=BLOCK_TOKENS)
    chunks = list(np.arange(blocks, dtype=np.int64).reshape(-1, CHUNK_BLOCKS))
    size = copier.shard_bytes(CHUNK_BLOCKS, fidelity=INT8)
    slots = [np.zeros(size, np.uint8) for _ in chunks]
    sums = copier.store(chunks, slots, fidelity=INT8, after=copier.mark())
    for each in pages:
        each.fill_(float("nan"))
    good = copier.load(
        slots, chunks, fidelity=INT8, is_sealed=lambda i, total: total == sums[i], after=None
    )
    assert good == len(chunks), (good, len(chunks))
    loaded = []
    for each in pages:
        both = each.transpose(0, 1).reshape(2, tokens, heads, elements).transpose(1, 2)
        loaded.append((both[0][None].contiguous(), both[1][None].contiguous()))
    _check_exact_tokens(kv, loaded)
    return loaded


def _check_exact_tokens(before: KV, after: KV) -> None:
    """Raise unless each chunk's first tokens came back bit for bit and something else did not."""
    chunk_tokens = BLOCK_TOKENS * CHUNK_BLOCKS
    is_first = torch.arange(before[0][0].shape[2]) % chunk_tokens < EXACT_TOKENS
    for own, other in zip(before, after, strict=True):
        for one, two in zip(own, other, strict=True):
            assert torch.equal(one[:, :, is_first], two[:, :, is_first])
            assert not torch.equal(one, two)


def through_fp8(kv: KV) -> KV:
    """Return a context's KV after a cast to fp8 e4m3 and back, without scales."""

    def cast(part: torch.Tensor) -> torch.Tensor:
        return part.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.bfloat16)

    return [(cast(keys), cast(values)) for keys, values in kv]


@dataclass
class Row:
    """What was seen of one kind of KV in one task, over all windows.

    Attributes:
        divergences: KL in nats from the reference to this, for each token.
        agreed: whether the likeliest token was the same, for each token.
        surprises: nats of the token that came, for each token.
        expected_surprises: the same by the reference.
        window_means: the mean KL of each window.
    """

    divergences: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    expected_surprises: list[float] = field(default_factory=list)
    window_means: list[float] = field(default_factory=list)

    def add(self, want: torch.Tensor, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Compare log-probabilities of one window, shape [tokens, vocabulary]."""
        divergence = (want.exp() * (want - got)).sum(-1).clamp(min=0)
        self.divergences += divergence.tolist()
        self.window_means.append(float(divergence.mean()))
        self.agreed += (want.argmax(-1) == got.argmax(-1)).tolist()
        place = truth[:, None]
        self.surprises += (-got.gather(1, place))[:, 0].tolist()
        self.expected_surprises += (-want.gather(1, place))[:, 0].tolist()

    def figures(self) -> dict[str, float]:
        """Return what the table shows; KL in thousandths of a nat."""
        surprise, expected = np.mean(self.surprises), np.mean(self.expected_surprises)
        return {
            "tokens": len(self.divergences),
            "kl_mean_mnat": float(np.mean(self.divergences)) * 1e3,
            "kl_p99_mnat": float(np.percentile(self.divergences, 99)) * 1e3,
            "kl_window_min_mnat": min(self.window_means) * 1e3,
            "kl_window_max_mnat": max(self.window_means) * 1e3,
            "agreement_percent": float(np.mean(self.agreed)) * 100,
            "perplexity": math.exp(surprise),
            "perplexity_change_percent": (math.exp(surprise - expected) - 1) * 100,
        }


KINDS: dict[str, Callable[[Model, torch.Tensor, KV], KV]] = {
    f"prefilled in pieces of {PIECE_TOKENS}": lambda model, context, _: model.prefill(
        context, piece_tokens=PIECE_TOKENS
    ),
    "computed in float32": lambda model, context, _: model.prefill_in_float32(context),
    "int8": lambda _model, _context, kv: through_int8(kv),
    "fp8 e4m3": lambda _model, _context, kv: through_fp8(kv),
}


def measure_window(
    model: Model, window: torch.Tensor, context_tokens: int, rows: dict[tuple[str, str], Row]
) -> None:
    """Add what one window of text shows to `rows`."""
    context, rest = window[:context_tokens], window[context_tokens:]
    start = context_tokens // 4
    read = {"continue": rest, "copy": context[start : start + len(rest)]}
    counted = {"continue": 0, "copy": SETTLING_TOKENS}
    reference = model.prefill(context, piece_tokens=context_tokens)
    expected = {task: model.read(reference, tokens) for task, tokens in read.items()}
    for kind in dict.fromkeys(kind for kind, _ in rows):
        kv = KINDS[kind](model, context, reference)
        for task, tokens in read.items():
            got, want, first = model.read(kv, tokens), expected[task], counted[task]
            rows[kind, task].add(want[first:-1], got[first:-1], tokens[first + 1 :])


def texts(paths: Sequence[Path]) -> dict[str, str]:
    """Return the texts by name."""
    if paths:
        return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in paths}
    import pydoc_data.topics

    found = {"Python's reference": "\n".join(pydoc_data.topics.topics.values())}
    library = importlib.util.find_spec("tvm_ffi")
    for place in (library and library.submodule_search_locations) or ():
        for path in Path(place).rglob("*Newton-Opticks.txt"):
            found["Newton's Opticks"] = path.read_text(encoding="utf-8", errors="replace")
    return found


def table(rows: dict[tuple[str, str], Row]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| task | KV of the context | KL mean (windows), mnat | p99 | same choice | perplexity |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, task), row in sorted(rows.items(), key=lambda item: TASKS.index(item[0][1])):
        one = row.figures()
        lines.append(
            f"| {task} | {kind} | {one['kl_mean_mnat']:.2f} ({one['kl_window_min_mnat']:.2f} to "
            f"{one['kl_window_max_mnat']:.2f}) | {one['kl_p99_mnat']:.1f} "
            f"| {one['agreement_percent']:.2f} % | {one['perplexity_change_percent']:+.2f} % |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print a table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a causal model")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a file; repeat it")
    parser.add_argument("--windows", type=int, default=2, help="of each text")
    parser.add_argument("--context", type=int, default=2048, help="tokens; whole chunks of 256")
    parser.add_argument("--read", type=int, default=320, help="tokens of each task")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of KV; repeat it")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        sys.exit(f"no model in {arguments.model}: run `make setup`, or name one with --model")
    started_s = time.monotonic()
    model = Model(arguments.model)
    rows = {(kind, task): Row() for kind in arguments.kind or KINDS for task in TASKS}
    length = arguments.context + arguments.read
    with torch.inference_mode():
        for name, text in texts(arguments.text).items():
            ids = model.tokens(text)
            if len(ids) < length * arguments.windows:
                sys.exit(f"{name}: {len(ids)} tokens are too few for {arguments.windows} windows")
            for index in range(arguments.windows):
                # The middle of each part, so that no window is a title page or an index.
                part = len(ids) // arguments.windows
                start = index * part + (part - length) // 2
                measure_window(model, ids[start : start + length], arguments.context, rows)
                print(
                    f"{name}, window {index + 1} of {arguments.windows}, tokens from {start:,}: "
                    f"{time.monotonic() - started_s:.0f} s",
                    flush=True,
                )
                print(table(rows), flush=True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {DEVICE}")
    if arguments.json:
        figures = {f"{task}: {kind}": row.figures() for (kind, task), row in rows.items()}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
