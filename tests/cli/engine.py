"""A small engine that speaks OpenAI's protocol over real HTTP, for the commands that ask one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
"""


class Engine:
    """Answers with five tokens; `has_chat` says whether it knows chats."""

    def __init__(self, *, has_chat=True, broken=False):
        self.has_chat = has_chat
        self.broken = broken
        self.bodies = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                pages = {
                    "/health": "",
                    "/version": json.dumps({"version": "0.32.0"}),
                    "/v1/models": json.dumps({"data": [{"id": "tiny", "max_model_len": 512}]}),
                    "/metrics": METRICS,
                }
                self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.bodies.append((self.path, body))
                is_chat = "chat" in self.path
                if is_chat and not engine.has_chat:
                    self.answer(400, json.dumps({"error": "no chat template"}))
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for number in range(1 if engine.broken else 5):
                    self.event(engine.token(number, is_chat=is_chat))
                if not engine.broken:
                    self.event({"choices": [], "usage": engine.usage()})
                    self.wfile.write(b"data: [DONE]\n\n")
                else:
                    self.event({"error": "out of luck"})

            def answer(self, status, text):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def event(self, event):
                self.wfile.write(b"data: " + json.dumps({"id": "cmpl-7", **event}).encode())
                self.wfile.write(b"\n\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @staticmethod
    def token(number, *, is_chat):
        text = f"t{number} "
        choice = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"choices": [choice]}

    @staticmethod
    def usage():
        return {
            "prompt_tokens": 40,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 32},
        }
