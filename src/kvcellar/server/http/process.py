"""The HTTP process: its entry, and how it ends with its parent.

Started by `server.child` with inherited sockets: the line to the control loop and the
listening sockets, which the parent opened so that a taken port is reported at start and a restart
of this process loses no connection. It lives exactly as long as its parent: the line's end and the
kernel's parent-death signal both end it at once.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from kvcellar.errors import KVCellarError
from kvcellar.protocol.messages import Ping
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.control_line import ControlLine
from kvcellar.server.http.pages import Look, make_app
from kvcellar.telemetry.aliases import Alias
from kvcellar.telemetry.logs import setup_logging

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_CONNECTIONS_MAX = 256
_KEEP_ALIVE_S = 15
_SIGN_S = 1.0


# Any: plain data, see `config.shown`.
def main(
    line_fd: int,
    listener_fds: Sequence[int],
    log_level: str,
    admin_token_file: str | None,
    config_page: Mapping[str, Any],
    aliases: Sequence[Sequence[str]],
) -> None:
    """Serve until the control process ends.

    Args:
        line_fd: socket to the control process; owned from here on.
        listener_fds: listening TCP sockets; owned from here on.
        log_level: see `setup_logging`.
        admin_token_file: `--admin-token-file`; None without.
        config_page: the settings without secrets.
        aliases: other names of metrics, see `telemetry.aliases`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    setup_logging(log_level)
    look = Look(config_page, tuple(Alias(*alias) for alias in aliases))
    asyncio.run(_serve(line_fd, listener_fds, Admission(admin_token_file), look))


async def _give_signs(line: ControlLine) -> None:
    """Tell the control process every second that this one is not frozen."""
    while True:
        with contextlib.suppress(KVCellarError):
            await line.call(Ping, timeout_s=_SIGN_S)
        await asyncio.sleep(_SIGN_S)


async def _serve(
    line_fd: int, listener_fds: Sequence[int], admission: Admission, look: Look
) -> None:
    # Not an orderly end: every answer would need the control process, which is gone.
    line = await ControlLine.open(socket.socket(fileno=line_fd), on_close=lambda: os._exit(0))
    config = uvicorn.Config(
        make_app(line, admission, look),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    server = uvicorn.Server(config)
    # The loop keeps only a weak reference to a task.
    signs = asyncio.create_task(_give_signs(line))
    signs.add_done_callback(lambda task: task.cancelled() or task.exception())
    await server.serve(sockets=[socket.socket(fileno=fd) for fd in listener_fds])
