"""`kvcellar doctor`: look for what is wrong on this host, and say what to type.

Quick, and it changes nothing: no engine is started, nothing heavy is imported. Exit code 1 if
there is a problem, so that a script can ask.
"""

import json
from collections.abc import Iterator, Sequence

from kvcellar.cli.asking import Asking, read_asking
from kvcellar.cli.checkup.findings import Finding, State
from kvcellar.cli.checkup.host import examine_host
from kvcellar.cli.checkup.servers import examine_servers
from kvcellar.cli.checkup.software import examine_software
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError
from kvcellar.units import bytes_from_gb

__all__ = ["run"]

_PORT_MAX = 65_535
_MORE = (
    Setting("http_port", "--http-port", "PORT", "The server's pages.", "", False, "8080"),
    Setting("l1_gb", "--l1-size-gb", "GB", "Whether a server of that size fits.", "", False, ""),
)
_MARKS = {State.OK: "ok     ", State.NOTE: "note   ", State.PROBLEM: "PROBLEM"}


def run(arguments: Sequence[str]) -> int:
    """Examine, print what was found, and return 1 if something is wrong, else 0.

    Raises:
        ConfigError: the command line is wrong.
    """
    asking = read_asking(arguments, program="kvcellar doctor", more=_MORE)
    findings = [*_findings(asking)]
    is_well = all(finding.state != State.PROBLEM for finding in findings)
    if asking.as_json:
        checks = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": is_well, "checks": checks}, indent=2))
    else:
        for finding in findings:
            print(f"{_MARKS[finding.state]}  {finding.name}: {finding.found}")
            if finding.fix:
                print(f"           → {finding.fix}")
    return 0 if is_well else 1


def _findings(asking: Asking) -> Iterator[Finding]:
    http_port = _port("--http-port", asking.more.get("http_port", "8080"))
    _port("--port", asking.port)
    l1_gb = asking.more.get("l1_gb")
    l1_bytes = None if l1_gb is None else _size(l1_gb)
    yield from examine_host(l1_bytes)
    yield from examine_software()
    yield from examine_servers(asking, http_port)


def _port(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _PORT_MAX):
        raise ConfigError(f"{flag} {text}: write a port from 1 to {_PORT_MAX}")
    return int(text)


def _size(text: str) -> int:
    try:
        size_bytes = bytes_from_gb(float(text))
    except (ValueError, OverflowError):
        size_bytes = 0
    if size_bytes <= 0:
        raise ConfigError(f"--l1-size-gb {text}: write a number of GB, as in --l1-size-gb 20")
    return size_bytes
