"""Frames: how a message becomes bytes on a stream, and back.

A connection begins with `PREAMBLE` from the client; then each side sends frames: the body's
length as uint32 little-endian, then the body, one msgpack message. The preamble tells a client of
another protocol (ZMQ, HTTP) at its first bytes. No I/O here: `FrameReader` is fed whatever came
and gives whole bodies. Used by the client library and by the server's sessions.
"""

from collections.abc import Iterator

import msgspec

from kvcellar.errors import LimitError, MalformedError
from kvcellar.protocol.limits import FRAME_MAX_BYTES
from kvcellar.protocol.messages import Reply, Request

__all__ = [
    "LENGTH_BYTES",
    "PREAMBLE",
    "UNREADABLE",
    "FrameReader",
    "decode_reply",
    "decode_request",
    "encode",
    "explain_foreign",
]

PREAMBLE = b"KVCELLAR"
LENGTH_BYTES = 4

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)
# RecursionError: a body that is nested some thousand deep is no message either.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder of any of our messages may raise."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of one message.

    Raises:
        LimitError: the body is larger than `FRAME_MAX_BYTES`.
    """
    body = _ENCODER.encode(message)
    if len(body) > FRAME_MAX_BYTES:
        raise LimitError(f"a message of {len(body)} bytes exceeds {FRAME_MAX_BYTES} bytes")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_request(body: bytes | memoryview) -> Request:
    """Return the request in a frame's body.

    Raises:
        MalformedError: it is none; the message says where.
    """
    try:
        return _REQUESTS.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"not a request of the kvcellar protocol: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    """Return the reply in a frame's body.

    Raises:
        MalformedError: it is none; the message says where.
    """
    try:
        return _REPLIES.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"not a reply of the kvcellar protocol: {error}") from error


class FrameReader:
    """Cuts a stream into frame bodies; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Take what arrived and give every whole body, in order.

        Frames that arrive whole, as nearly all do, are cut out of `data` itself: it must not
        change until the iterator has ended, and what was not taken then is kept for the next call.

        Raises:
            LimitError: a frame announces more than `FRAME_MAX_BYTES`; the stream is unusable.
        """
        if self._rest:
            self._rest += data
            if _frame_end(self._rest, 0) is None:
                return
            data, self._rest = self._rest, bytearray()
        view = memoryview(data)
        start = 0
        try:
            while (end := _frame_end(view, start)) is not None:
                body = bytes(view[start + LENGTH_BYTES : end])
                start = end
                yield body
        finally:
            self._rest += view[start:]


def _frame_end(stream: bytearray | memoryview, start: int) -> int | None:
    """Return where the frame that begins at `start` ends, None while it is incomplete."""
    head = start + LENGTH_BYTES
    if len(stream) < head:
        return None
    length = int.from_bytes(stream[start:head], "little")
    if length > FRAME_MAX_BYTES:
        raise LimitError(f"a frame announces {length} bytes, over {FRAME_MAX_BYTES}")
    return head + length if len(stream) >= head + length else None


def explain_foreign(first_bytes: bytes) -> str:
    """Return what a peer seems to speak that did not begin with `PREAMBLE`, and what to do.

    Args:
        first_bytes: the first 8 or more bytes that it sent.
    """
    if first_bytes[:1] == b"\xff" and first_bytes[1:8] == b"\x00" * 7:
        return (
            "a ZeroMQ client (LMCache's own connector?) called; kvcellar serves its own connector: "
            "install kvcellar in the engine's environment (its plug-in then takes the name "
            "LMCacheMPConnector), or set kv_connector_module_path to kvcellar.compat.vllm"
        )
    if first_bytes[:4] in {b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI"}:
        return "an HTTP client called the engines' port; HTTP is served on --http-port"
    if first_bytes[:2] == b"\x16\x03":
        return "a TLS client called; the node's protocol is plain and local"
    return "the peer does not speak the kvcellar protocol"
