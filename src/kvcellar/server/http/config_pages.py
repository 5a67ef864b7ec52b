"""`/config`: the settings that this server runs with, without secrets; and what is not here at all.

LMCache's `/env` shows every variable of the environment, passwords included, and `/run_script`
runs whatever it is sent. Neither is here, and the answer says why, so that nobody looks for it.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.server.http.bodies import PageWrapper, RefusedError, pretty_json

__all__ = ["ABSENT", "ConfigPages"]

ABSENT: Mapping[str, str] = {
    "/env": "an environment holds secrets; /config shows what this server runs with",
    "/run_script": "kvcellar runs nobody's code in its server",
    "/loglevel": "a GET must change nothing; restart the server with --log-level",
    "/threads": "one event loop serves; py-spy dump --pid PID shows what it does",
    "/cache/checksums": "slots are sealed, and each load checks the seal; see "
    "kvcellar_damaged_chunks_total in /metrics",
}
"""Paths of LMCache's server that have no place here, and why."""


class ConfigPages:
    """/config, and the paths that are refused with a reason."""

    def __init__(self, page: Mapping[str, Any]) -> None:
        self._page = page

    def routes(self, answered: PageWrapper) -> list[Route]:
        """Return the routes, each wrapped by `answered`."""
        methods = ["GET", "POST", "PUT", "DELETE"]
        absent = [Route(path, answered(self.absent), methods=methods) for path in ABSENT]
        return [Route("/config", answered(self.config), methods=["GET"]), *absent]

    async def config(self, _request: HttpRequest) -> Response:
        """Answer with the settings."""
        return pretty_json(self._page)

    async def absent(self, request: HttpRequest) -> Response:
        """Refuse, and say why."""
        path = request.url.path
        raise RefusedError(404, f"{request.method} {path} is not here: {ABSENT[path]}")
