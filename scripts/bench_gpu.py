#!/usr/bin/env python3
"""The whole measurement on a GPU: `make bench-gpu`.

First the copies alone (`bench_gpu_copies.py`: rates beside plain DMA, the seal's cost, a matrix
product beside them), then times to the first token of every case: vLLM alone first and last, its
OffloadingConnector, LMCache, PegaFlow, kvcellar, kvcellar with int8. Beside each figure stands what
it should be: own hit, plus the bytes over the DMA rate of this run, plus 5 ms.

Every case leaves a file in the output folder when it is over, and a later call goes on with those
that are missing; `--time-limit` ends a call in time. `report.md` and `report.json` are written
after each case. `--device cpu` tries the driver with a small real model and no link. Needs
PYTHONPATH=src where kvcellar is not installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from kvcellar.bench.layers import LAYERS, make_layer
from kvcellar.bench.machine import machine_facts
from kvcellar.bench.programs import Programs
from kvcellar.bench.side_by_side import Engine, Work, keep, kept, measure_case
from kvcellar.bench.side_by_side_report import Link, report
from kvcellar.clock import SystemClock

ROOT = Path(__file__).resolve().parent.parent
KIT = Path(os.environ.get("KIT", Path.home() / "kit"))
"""Where an engine and a model lie on a machine without a network; ignored where they do not."""
COPIES = "copies"
CASE_S = 200.0
"""What a case takes where none has been measured yet."""
GPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
CPU_ENVIRONMENT = {
    **GPU_ENVIRONMENT,
    "OMP_NUM_THREADS": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".stack" / "vllm-cache"),
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def parse() -> argparse.Namespace:
    """Return the options, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join((COPIES, *LAYERS)), help="of them, with commas")
    parser.add_argument("--out", type=Path, help="folder; default .stack/bench-gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of the model; its weights are not read")
    parser.add_argument("--lengths", help="tokens of the prompts, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--burst", help="prompts x tokens, or 0x0")
    parser.add_argument("--early", type=float, default=8.0, help="s of prompts right after a start")
    parser.add_argument("--l1-gb", type=float, help="host memory of a layer")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs and async scheduling")
    parser.add_argument("--again", action="store_true", help="measure what was measured already")
    parser.add_argument("--time-limit", type=float, default=1e9, help="s; start no case behind it")
    parser.add_argument("--gb-per-s", type=float, help="the link's rate, where copies are left out")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    folder = "bench-gpu" if is_gpu else "bench-cpu"
    options.out = options.out or ROOT / ".stack" / (folder + "-graphs" * options.graphs)
    options.model = options.model or (KIT / "m" if is_gpu else ROOT / ".stack" / "model")
    options.lengths = options.lengths or ("1024,8192,32768,60000" if is_gpu else "600,1500")
    options.burst = options.burst or ("16x16384" if is_gpu else "3x700")
    options.l1_gb = options.l1_gb or (40.0 if is_gpu else 1.0)
    options.cases = [name for name in options.cases.split(",") if name]
    for name in options.cases:
        if name not in (COPIES, *LAYERS):
            parser.error(f"there is no case {name!r}, only {', '.join((COPIES, *LAYERS))}")
    if not (options.model / "config.json").is_file():
        parser.error(f"no model in {options.model}: --model names the folder with its config.json")
    return options


def engine_of(options: argparse.Namespace) -> Engine:
    """Return how vLLM is started on the device."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)]
    if options.device == "cpu":
        words += ["--max-model-len", "8192", "--dtype", "float32", "--enforce-eager"]
        words += ["--disable-uvicorn-access-log"]
        return Engine(words, CPU_ENVIRONMENT)
    words += ["--load-format", "dummy", "--max-model-len", "65536"]
    words += ["--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.6"]
    words += ["--attention-backend", "FLASH_ATTN", "--disable-uvicorn-access-log"]
    words += ["--async-scheduling"] if options.graphs else ["--enforce-eager"]
    return Engine(words, GPU_ENVIRONMENT)


def kv_bytes_a_token(options: argparse.Namespace) -> int:
    """Return what a token's KV weighs, from the model's configuration."""
    page = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    heads = page.get("num_key_value_heads", page["num_attention_heads"])
    size = page.get("head_dim") or page["hidden_size"] // page["num_attention_heads"]
    return int(
        2 * page["num_hidden_layers"] * heads * size * (2 if options.device == "cuda" else 4)
    )


def measure_copies(options: argparse.Namespace) -> None:
    """Run the copies' own benchmark in a process of its own, which gives the GPU back."""
    words = [sys.executable, str(ROOT / "scripts" / "bench_gpu_copies.py")]
    words += ["--json", str(options.out / "copies.json")]
    done = subprocess.run(words, check=False)
    if done.returncode:
        sys.exit(
            f"bench-gpu: the copies failed with status {done.returncode}; nothing else was run"
        )


def link_of(options: argparse.Namespace) -> Link:
    """Return the link's rate: as given, or as the copies' benchmark found it."""
    rate = options.gb_per_s
    if rate is None and (options.out / "copies.json").is_file():
        page = json.loads((options.out / "copies.json").read_text(encoding="utf-8"))
        rate = page["dma"]["load"]
    return Link(kv_bytes_a_token(options), rate)


def write_report(options: argparse.Namespace, work: Work) -> str:
    """Write what is known by now, and return it as text."""
    cases = [case for name in LAYERS if (case := kept(options.out, name)) is not None]
    facts = machine_facts()
    facts["run"] = f"{options.device}, {'CUDA graphs' if options.graphs else 'eager'}, {work}"
    link = link_of(options)
    facts["link"] = f"{link.gb_per_s} GB/s from host to device, {link.kv_bytes_a_token:,} KV bytes"
    text = report(cases, link=link, facts=facts)
    (options.out / "report.md").write_text(text, encoding="utf-8")
    page = {"facts": facts, "cases": cases, "link": asdict(link)}
    (options.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(page)))
    return text


def check_settings(options: argparse.Namespace, work: Work) -> None:
    """Refuse to put figures of one kind of run beside those of another."""
    path, now = options.out / "settings.txt", f"{work} {options.model} {options.l1_gb:g} GiB\n"
    if path.is_file() and path.read_text(encoding="utf-8") != now and not options.again:
        sys.exit(f"{options.out} has figures of other settings: --again or another --out")
    path.write_text(now, encoding="utf-8")


def main() -> int:
    """Measure what is missing; return 0 if every case is there, or cannot be measured here."""
    options, started_s = parse(), time.monotonic()
    count, _, tokens = options.burst.partition("x")
    lengths = [int(word) for word in options.lengths.split(",")]
    work = Work(lengths, options.repeats, int(count), int(tokens), options.early)
    options.out.mkdir(parents=True, exist_ok=True)
    check_settings(options, work)
    roots = [str(ROOT / "src"), str(KIT / "site") if (KIT / "site").is_dir() else ""]
    roots.append(os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    sys.path[1:1] = [root for root in roots[1:] if root]
    if COPIES in options.cases and (options.again or not (options.out / "copies.json").is_file()):
        measure_copies(options)
    programs, missing = Programs(options.out / "logs", SystemClock()), []
    longest_s = CASE_S if options.device == "cuda" else 0.0

    def say(text: str) -> None:
        print(f"{time.monotonic() - started_s:6.0f} s  {text}", flush=True)

    try:
        for name in [name for name in LAYERS if name in options.cases]:
            case = None if options.again else kept(options.out, name)
            if case is None or case.trouble:
                if time.monotonic() - started_s + longest_s > options.time_limit:
                    say(f"{name}: not begun, the time is nearly over; call again to go on")
                    missing.append(name)
                    continue
                layer = make_layer(name, l1_gb=options.l1_gb)
                case = measure_case(
                    layer,
                    engine_of(options),
                    work=work,
                    programs=programs,
                    clock=SystemClock(),
                    say=say,
                )
                keep(case, options.out)
                write_report(options, work)
                longest_s = max(case.took_s, longest_s if longest_s != CASE_S else 0.0)
                if layer.missing:
                    continue
            if case.trouble:
                missing.append(f"{name} ({case.trouble.partition(chr(10))[0]})")
    finally:
        programs.stop_all()
    print(write_report(options, work))
    if missing:
        print(f"bench-gpu: without {', '.join(missing)}; everything is in {options.out}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
