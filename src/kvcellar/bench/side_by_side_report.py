"""The table of several KV layers' times to the first token, beside the rule that they should meet.

The rule for a layer's hit: vLLM's own hit of the same engine, the KV's bytes over the link's
measured rate, and 5 ms. For the burst: its own hits and 0.8 of the link's time, for they overlap. A
cold prompt may cost 1 % more than with vLLM alone, which runs first and last: where those two
differ by more, the figure says nothing. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcellar.bench.figures import median
from kvcellar.bench.side_by_side import Case

__all__ = ["Link", "report"]

_SLACK_S = 0.005
_BURST_SHARE = 0.8
_ALONE = ("none", "none-again")


@dataclass(frozen=True)
class Link:
    """What crosses the link, and how fast that could be.

    Attributes:
        kv_bytes_a_token: of the model.
        gb_per_s: plain DMA from the host to the device; None where there is no link.
    """

    kv_bytes_a_token: int
    gb_per_s: float | None

    def seconds(self, tokens: int, *, share: float) -> float | None:
        """Return how long the KV of so many tokens takes, of which `share` crosses."""
        if self.gb_per_s is None:
            return None
        return tokens * self.kv_bytes_a_token * share / 1e9 / self.gb_per_s


def report(cases: Sequence[Case], *, link: Link, facts: Mapping[str, str]) -> str:
    """Return the figures as Markdown.

    Args:
        cases: in the order of the table.
        link: for the rule.
        facts: the machine and how it was run.
    """
    lines = [f"* {name}: {value}" for name, value in facts.items()]
    lines += [
        "",
        "Seconds, medians; `same` is whether cold and the layer's hit gave one answer.",
        "",
    ]
    lines += _hits(cases, link)
    lines += ["", "The burst, seconds until all were answered:", "", *_bursts(cases, link)]
    lines += ["", "Cold prompts beside vLLM alone, and the first seconds of each engine:", ""]
    lines += _colds(cases)
    lines += [f"\n{case.name} was not measured: {case.trouble}" for case in cases if case.trouble]
    return "\n".join(lines) + "\n"


def _hits(cases: Sequence[Case], link: Link) -> list[str]:
    lines = [
        "| tokens | layer | cold | own hit | layer's hit | KV GB/s | rule | over it, ms | same |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for length in sorted({length for case in cases for length in case.hits}):
        for case in cases:
            hits = case.hits.get(length)
            if not hits:
                continue
            cold_s = median([hit.cold_s for hit in hits])
            own_s = median([hit.own_s for hit in hits])
            cells = [f"{length:,}", case.name, f"{cold_s:.3f}", f"{own_s:.3f}"]
            given = min(hit.hit_tokens for hit in hits)
            if case.name in _ALONE:
                cells += [""] * 5
            elif given < length - 512:
                # A chunk and a bit may be missing at the end; more is no hit.
                cells += [f"no hit: {given:,} tokens", "", "", "", ""]
            else:
                layer_s = median([hit.layer_s for hit in hits])
                rate = given * link.kv_bytes_a_token / 1e9 / max(layer_s - own_s, 1e-9)
                cells += [f"**{layer_s:.3f}**", f"{rate:.1f}"]
                cells += _against(layer_s, own_s, link.seconds(given, share=case.kv_bytes_share), 1)
                cells.append("yes" if all(hit.is_same_text for hit in hits) else "no")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _bursts(cases: Sequence[Case], link: Link) -> list[str]:
    lines = [
        "| layer | cold | own hits | layer's hits | rule | over it, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        burst = case.burst
        if burst is None:
            continue
        cells = [case.name, f"{burst.cold_s:.2f}", f"{burst.own_s:.2f}"]
        if case.name in _ALONE:
            cells += ["", "", ""]
        else:
            link_s = link.seconds(burst.hit_tokens, share=case.kv_bytes_share)
            cells.append(f"**{burst.layer_s:.2f}** ({burst.hit_tokens:,} tokens)")
            cells += _against(burst.layer_s, burst.own_s, link_s, _BURST_SHARE)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _against(layer_s: float, own_s: float, link_s: float | None, share: float) -> list[str]:
    """Return what the rule says and by how many milliseconds it was missed."""
    if link_s is None:
        return ["", ""]
    slack_s = _SLACK_S if share == 1 else 0.0
    rule_s = own_s + share * link_s + slack_s
    return [f"{rule_s:.3f}", f"{(layer_s - rule_s) * 1e3:+.0f}"]


def _colds(cases: Sequence[Case]) -> list[str]:
    alone = [case for case in cases if case.name in _ALONE]
    lengths = sorted({length for case in cases for length in case.hits})
    heads = ["layer", *(f"{length:,}" for length in lengths), "burst", "first prompts, slowest"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    spreads = ["spread of vLLM alone"]
    for length in [*lengths, None]:
        times = [time for case in alone if (time := _cold(case, length)) is not None]
        spreads.append(f"{(max(times) / min(times) - 1) * 100:.1f} %" if len(times) > 1 else "")
    lines.append(f"| {' | '.join([*spreads, ''])} |")
    for case in cases:
        cells = [case.name]
        for length in [*lengths, None]:
            times = [time for each in alone if (time := _cold(each, length)) is not None]
            own = _cold(case, length)
            if own is None or not times or case in alone:
                cells.append("")
            else:
                cells.append(f"{(own / (sum(times) / len(times)) - 1) * 100:+.1f} %")
        cells.append(f"{max(case.early_s):.3f} of {len(case.early_s)}" if case.early_s else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cold(case: Case, length: int | None) -> float | None:
    """Return a case's cold time at one length, or of the burst."""
    if length is None:
        return case.burst.cold_s if case.burst is not None else None
    hits = case.hits.get(length)
    return median([hit.cold_s for hit in hits]) if hits else None
