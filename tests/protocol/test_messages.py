"""Messages survive the wire, and nothing that is no message gets through or does harm."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.protocol.strategies import REPLY_TYPES, REQUEST_TYPES, replies, requests

from kvcellar.errors import LimitError, MalformedError
from kvcellar.protocol import messages
from kvcellar.protocol.frames import (
    LENGTH_BYTES,
    FrameReader,
    decode_reply,
    decode_request,
    encode,
)
from kvcellar.protocol.limits import FRAME_MAX_BYTES

ALL_TYPES = REQUEST_TYPES + REPLY_TYPES
NESTED = b"\x91" * 1_000_000


def body_of(message):
    return encode(message)[LENGTH_BYTES:]


def decoded_or_refused(decode, body):
    """Return the message, or None when it was refused in the only way that is allowed."""
    try:
        return decode(body)
    except (MalformedError, LimitError):
        return None


@given(requests)
def test_a_request_arrives_as_it_was_sent(request):
    assert decode_request(body_of(request)) == request


@given(replies)
def test_a_reply_arrives_as_it_was_sent(reply):
    assert decode_reply(body_of(reply)) == reply


def test_every_message_has_its_own_tag_and_an_id_first():
    tags = [kind.__struct_config__.tag for kind in ALL_TYPES]
    assert len(set(tags)) == len(tags)
    assert {kind.__struct_fields__[0] for kind in ALL_TYPES} == {"id"}


def test_every_exported_message_belongs_to_one_of_the_unions():
    exported = {getattr(messages, name) for name in messages.__all__}
    types = {kind for kind in exported if isinstance(kind, type)}
    structs = {kind for kind in types if issubclass(kind, msgspec.Struct)}
    assert structs == set(ALL_TYPES)


def test_a_newer_peers_extra_field_is_ignored():
    body = msgspec.msgpack.encode(["ping", 7, "something new"])
    assert decode_request(body) == messages.Ping(7)


@pytest.mark.parametrize("kind", REQUEST_TYPES)
def test_a_request_is_no_reply(kind):
    body = msgspec.msgpack.encode([kind.__struct_config__.tag, 1])
    with pytest.raises(MalformedError):
        decode_reply(body)


@given(st.binary(max_size=200))
@example(b"")
@example(NESTED)
@example(msgspec.msgpack.encode("ping"))
@example(b"\x93\xa4ping\x01" + NESTED)
@example(b"\x93\xacstatus_reply\x01\x81\xa1a" + NESTED)
@example(b"\x93\xacstatus_reply\x01\x81\xa1a\x81\x91\x80\x01")
@example(b"\x93\xacstatus_reply\x01\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12)
@example(b"\x93\xa7release\x01\xdd\xff\xff\xff\xff")
@example(b"\x92\xa4pin\xff\x01")
@example(b"\x94\xa5error\x01\xa2\xff\xff\xa1x")
def test_bytes_that_are_no_message_are_malformed(body):
    decoded_or_refused(decode_request, body)
    decoded_or_refused(decode_reply, body)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)  # fmt: skip


@given(st.sampled_from(ALL_TYPES), st.lists(_ANYTHING, max_size=12))
def test_a_known_tag_with_wrong_fields_is_malformed_or_well_typed(kind, fields):
    body = msgspec.msgpack.encode([kind.__struct_config__.tag, *fields])
    for decode in (decode_request, decode_reply):
        message = decoded_or_refused(decode, body)
        if message is not None:
            # What got through has the annotated types: encoding it and reading it back agrees.
            assert isinstance(message, kind)
            assert type(message.id) is int
            again = msgspec.convert(msgspec.to_builtins(message), kind, strict=True)
            assert repr(again) == repr(message)


@given(requests | replies, st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(message, data):
    body = bytearray(body_of(message))
    position = data.draw(st.integers(0, len(body) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            body[position] ^= data.draw(st.integers(1, 255))
        case "cut":
            del body[position:]
        case "insert":
            body[position:position] = data.draw(st.binary(min_size=1, max_size=5))
    decoded_or_refused(decode_request, bytes(body))
    decoded_or_refused(decode_reply, bytes(body))


def cut(stream, cuts):
    positions = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[a:b] for a, b in pairwise(positions)]


@given(st.lists(requests, max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_frames_come_out_whole_however_the_stream_is_cut(sent, cuts):
    reader = FrameReader()
    stream = b"".join(encode(message) for message in sent)
    bodies = [body for piece in cut(stream, cuts) for body in reader.feed(piece)]
    assert [decode_request(body) for body in bodies] == sent


@given(st.lists(st.binary(max_size=40), max_size=10))
@example([b"\xff" * 8])
def test_a_stream_of_garbage_gives_bodies_or_a_limit_error(pieces):
    reader = FrameReader()
    fed = 0
    given_back = 0
    try:
        for piece in pieces:
            fed += len(piece)
            given_back += sum(LENGTH_BYTES + len(body) for body in reader.feed(piece))
    except LimitError:
        return
    assert given_back <= fed


def test_a_frame_that_announces_too_much_is_refused_before_its_body_comes():
    reader = FrameReader()
    whole = encode(messages.Ping(1))
    announced = (FRAME_MAX_BYTES + 1).to_bytes(LENGTH_BYTES, "little")
    frames = reader.feed(whole + announced)
    assert next(frames) == whole[LENGTH_BYTES:]
    with pytest.raises(LimitError, match=str(FRAME_MAX_BYTES)):
        next(frames)


def test_the_largest_frame_is_accepted_and_one_byte_more_is_not():
    overhead = len(body_of(messages.Lookup(1, b"\0" * (1 << 16)))) - (1 << 16)
    largest = messages.Lookup(1, bytes(FRAME_MAX_BYTES - overhead))
    frame = encode(largest)
    assert len(frame) == LENGTH_BYTES + FRAME_MAX_BYTES
    assert [len(body) for body in FrameReader().feed(frame)] == [FRAME_MAX_BYTES]
    with pytest.raises(LimitError):
        encode(messages.Lookup(1, bytes(FRAME_MAX_BYTES - overhead + 1)))


@pytest.mark.parametrize("tag", ["release", "heartbeat", "bind"])
def test_a_runaway_list_is_refused_before_it_is_built(tag):
    runaway = b"\xdd" + (30_000_000).to_bytes(4, "big") + b"\x01" * 100
    before = {"release": b"", "heartbeat": b"\x90", "bind": b"\xc4\x01x\x01"}[tag]
    body = b"\x99" + msgspec.msgpack.encode(tag) + b"\x01" + before + runaway
    with pytest.raises(MalformedError, match="length <="):
        decode_request(body)
