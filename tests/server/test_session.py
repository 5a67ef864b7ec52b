"""One connection's turn: bounded work, order kept, and nothing read while others wait."""

import asyncio

from kvcellar.protocol.frames import FrameReader, decode_reply, encode
from kvcellar.protocol.messages import Goodbye, Ok, Ping, Pong
from kvcellar.server.bounds import REQUESTS_PER_TURN
from kvcellar.server.session import Session


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.is_reading = True
        self.is_closed = False

    def write(self, data):
        self.written += data

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def get_write_buffer_size(self):
        return 0

    def close(self):
        self.is_closed = True

    def replies(self):
        return [decode_reply(body).id for body in FrameReader().feed(self.written)]


class Answers:
    """Answers a ping and nothing else."""

    def answer(self, client, request):
        return Pong(request.id, b"") if isinstance(request, Ping) else Ok(request.id)


def connected():
    wire = Wire()
    session = Session(Answers(), on_lost=lambda _: None)
    session.client = None
    session.connection_made(wire)
    return wire, session


def pings(count):
    return b"".join(encode(Ping(number)) for number in range(1, count + 1))


async def test_a_flood_is_answered_in_turns_and_in_order():
    wire, session = connected()
    count = 2 * REQUESTS_PER_TURN + 5
    session.data_received(pings(count))
    assert wire.replies() == list(range(1, REQUESTS_PER_TURN + 1))
    assert not wire.is_reading, "more would only wait in memory"
    turns = []
    while len(wire.replies()) < count:
        turns.append(len(wire.replies()))
        await asyncio.sleep(0)
    assert len(turns) == 2, "others have a turn in between"
    assert wire.replies() == list(range(1, count + 1))
    assert wire.is_reading


async def test_a_turn_that_ends_with_the_last_request_goes_on_reading():
    wire, session = connected()
    session.data_received(pings(REQUESTS_PER_TURN))
    await asyncio.sleep(0)
    assert wire.is_reading
    session.data_received(encode(Ping(99)))
    assert wire.replies()[-1] == 99


async def test_nothing_is_answered_after_a_goodbye():
    wire, session = connected()
    session.data_received(encode(Goodbye(1)) + encode(Ping(2)))
    assert wire.replies() == [1]
    assert wire.is_closed


async def test_a_connection_that_closes_between_two_turns_is_left_alone():
    wire, session = connected()
    session.data_received(pings(2 * REQUESTS_PER_TURN))
    session.connection_lost(None)
    await asyncio.sleep(0)
    assert len(wire.replies()) == REQUESTS_PER_TURN


async def test_a_frame_in_pieces_is_one_request():
    wire, session = connected()
    for byte in encode(Ping(7)):
        session.data_received(bytes([byte]))
    assert wire.replies() == [7]
