"""What a run was asked for: its flags, checked.

Also the place of every number that decides how long a run takes, so that `--quick` is one choice
made once and not a condition in each measurement.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Effort", "Options", "parse"]

PARTS = ("copies", "lookup", "ttft", "server", "disk")


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        copy_rounds: rounds of each copy, of which the medians are shown.
        lookup_s: seconds for which each number of keys is looked up.
        stored_keys: keys that are stored to find the memory a key takes.
        prompt_tokens: lengths of the prompts sent to vLLM.
        prompts: prompts of each length; the median is shown.
        chunk_tokens: chunk sizes of our server; LMCache's is measured with the first.
        starts: times that a server is started; the median is shown.
        disk_rounds: rounds of writing to and reading from the disk, of which medians are shown.
    """

    copy_rounds: int
    lookup_s: float
    stored_keys: int
    prompt_tokens: tuple[int, ...]
    prompts: int
    chunk_tokens: tuple[int, ...]
    starts: int
    disk_rounds: int


_FULL = Effort(
    copy_rounds=15,
    lookup_s=4.0,
    stored_keys=200_000,
    prompt_tokens=(2_000, 4_000),
    prompts=3,
    chunk_tokens=(256, 128),
    starts=5,
    disk_rounds=7,
)
_QUICK = Effort(
    copy_rounds=5,
    lookup_s=0.5,
    stored_keys=20_000,
    prompt_tokens=(600,),
    prompts=1,
    chunk_tokens=(256,),
    starts=1,
    disk_rounds=1,
)


@dataclass(frozen=True)
class Options:
    """One run.

    Attributes:
        parts: which of `PARTS`, in their order.
        effort: how much.
        is_quick: whether the figures are only good to see that it works.
        json_path: where the figures go as JSON too; None for nowhere.
    """

    parts: tuple[str, ...]
    effort: Effort
    is_quick: bool
    json_path: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Return the options; explains itself and ends the process when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure copies, lookups, time to first token, the server's cost and the "
        "disk, each beside its ceiling and beside LMCache's server.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short runs, to see that it works; no figures to keep"
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=PARTS,
        metavar="PART[,PART]",
        help=f"measure only these: {', '.join(PARTS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parsed = parser.parse_args(arguments)
    return Options(
        parts=parsed.only,
        effort=_QUICK if parsed.quick else _FULL,
        is_quick=parsed.quick,
        json_path=parsed.json,
    )


def _parts(text: str) -> tuple[str, ...]:
    asked = [part.strip() for part in text.split(",")]
    unknown = [part for part in asked if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(PARTS)}"
        )
    return tuple(part for part in PARTS if part in asked)
