"""Write docs/configuration.md from the configuration's own annotations.

    python scripts/docs_config.py            write it
    python scripts/docs_config.py --check    exit 1 if it is stale

What a setting is called, does and defaults to stands once, at its field; this page is made from
there, and a test runs the check.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.config.flags import ForeignFlag, Verdict
from kvcellar.config.server import Setting, settings

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration of the server

<!-- Made by scripts/docs_config.py from the code. Do not edit. -->

`kvcellar server` is configured by flags alone. Each is written in full (`--chunk-size 256` or
`--chunk-size=256`); abbreviations are refused, and of a flag that is given twice the last counts.
A wrong value stops the start with exit code 2 and a line that names the flag, the value and the
fix. `KVCELLAR_LOG_LEVEL` is read where `--log-level` is not given (`LMCACHE_LOG_LEVEL` under
LMCache's name); no other environment variable is.

The smallest command is

```
kvcellar server --l1-size-gb 20 --eviction-policy LRU
```
"""

LMCACHE = """## `lmcache server`

The same server under LMCache's name takes the flags above and every other flag of LMCache 0.5.6.
Some tune a part that does not exist here: they are accepted, and one line at the start says why
they change nothing. Others ask for what kvcellar 0.1 does not have: they are refused with the
reason, because a cache that silently lacks what was asked for is worse than one that does not
start.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join([HEAD, *_own(settings()), LMCACHE, *_foreign(LMCACHE_SERVER_FLAGS)])


def _own(found: tuple[Setting, ...]) -> Iterator[str]:
    for setting in found:
        if setting.required:
            default = "Required."
        elif setting.default:
            default = f"Default `{setting.default}`."
        else:
            default = "Not set by default."
        heading = f"{setting.flag} {setting.value}".strip()
        yield f"## `{heading}`\n"
        yield f"{setting.description} {default}\n"
        yield f"*Change it:* {setting.change}\n"


def _foreign(flags: tuple[ForeignFlag, ...]) -> Iterator[str]:
    for verdict, title in (
        (Verdict.NOTED, "Accepted, and changes nothing"),
        (Verdict.REFUSED, "Refused"),
    ):
        yield f"### {title}\n"
        yield "| flag | because |\n| --- | --- |"
        chosen = [flag for flag in flags if flag.verdict == verdict]
        for reason, group in groupby(chosen, key=lambda flag: flag.reason):
            yield f"| {', '.join(map(_shown, group))} | {reason} |"
        yield ""


def _shown(flag: ForeignFlag) -> str:
    fine = f" (but {' or '.join(f'`{value}`' for value in flag.fine)} is fine)" if flag.fine else ""
    return f"`{flag.name}`{fine}"


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.name} is stale: run python scripts/docs_config.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
