"""`/openapi.json` and `/docs`: what can be asked here, for programs and for people.

The page is plain HTML without any script, made from the description; it loads nothing from
anywhere, so it works where there is no way out.
"""

import html
import json

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kvcellar import __version__
from kvcellar.server.http.bodies import PageWrapper, pretty_json
from kvcellar.server.http.openapi import OPERATIONS, Operation, description

__all__ = ["ApiPages"]

_STYLE = (
    "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1rem;margin:1.5rem 0 .25rem}code,pre{background:#f3f3f3}pre{padding:.5rem;"
    "overflow:auto}"
)


class ApiPages:
    """The description of all pages."""

    def routes(self, answered: PageWrapper) -> list[Route]:
        """Return the routes, each wrapped by `answered`."""
        return [
            Route("/openapi.json", answered(self.openapi), methods=["GET"]),
            Route("/docs", answered(self.docs), methods=["GET"]),
        ]

    async def openapi(self, _request: HttpRequest) -> Response:
        """Answer with the description as OpenAPI."""
        return pretty_json(description())

    async def docs(self, _request: HttpRequest) -> Response:
        """Answer with the description as a page."""
        parts = "\n".join(_part(operation) for operation in OPERATIONS)
        return HTMLResponse(
            f"<!doctype html><html lang=en><meta charset=utf-8><title>kvcellar</title>"
            f"<style>{_STYLE}</style><h1>kvcellar {html.escape(__version__)}</h1>"
            f"<p>For programs: <a href=openapi.json>openapi.json</a>. What changes something, or "
            f"lists, is answered to this host only, or to whoever has the admin token.</p>\n"
            f"{parts}</html>"
        )


def _part(operation: Operation) -> str:
    lines = [
        f"<h2><code>{operation.method.upper()} {html.escape(operation.path)}</code></h2>",
        f"<p>{html.escape(operation.summary)}</p>",
    ]
    for title, schema in (
        ("query", {name: dict(schema) for name, schema in operation.query.items()}),
        ("body", operation.body and operation.body["properties"]),
        ("answer", operation.answer and operation.answer.get("properties")),
    ):
        if schema:
            text = html.escape(json.dumps(schema, indent=1))
            lines.append(f"<details><summary>{title}</summary><pre>{text}</pre></details>")
    return "\n".join(lines)
