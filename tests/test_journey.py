"""The journey of a chunk is true: its code runs against a real server and prints what it says."""

import contextlib
import io
import os
import re
from pathlib import Path

from tests.server.running import RunningServer, eventually

from kvcellar.client.tool import connect_tool
from kvcellar.protocol.messages import Status

PAGE = Path(__file__).parent.parent / "docs" / "journey-of-a-chunk.md"
FENCE = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_journey_of_a_chunk_happens_as_the_page_says(tmp_path):
    blocks = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["python", "text"] * 11
    with contextlib.ExitStack() as stack:
        flags = ("--chunk-size", "32", "--disk-path", str(tmp_path))
        server = stack.enter_context(RunningServer(*flags))

        def status():
            with connect_tool("localhost", server.port) as tool:
                return tool.call(Status, timeout_s=5).status

        def restart():
            nonlocal server
            server.kill()
            server = stack.enter_context(RunningServer(*flags))
            return server.port

        # Memory comes in the background; the page begins when the first step of it is there.
        eventually(lambda: status()["storage_manager"]["l1_manager"]["memory_total_bytes"])
        names = {"PORT": server.port, "os": os, "status": status}
        names |= {"restart": restart, "eventually": eventually}
        printed = ""
        for kind, text in blocks:
            if kind == "python":
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(text, str(PAGE), "exec"), names)
                printed = output.getvalue()
            else:
                assert printed == text
