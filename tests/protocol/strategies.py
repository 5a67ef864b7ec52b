"""Messages for hypothesis, made from the annotations of the message classes themselves."""

import types
import typing

import msgspec
from hypothesis import strategies as st

from kvcellar.protocol import messages

REQUEST_TYPES = typing.get_args(messages.Request)
REPLY_TYPES = typing.get_args(messages.Reply)

_PLAIN = st.none() | st.booleans() | st.integers(0, 2**63) | st.text(max_size=8)
_STATUS = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


_SCALARS = {
    int: st.integers(0, 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=80),
    bool: st.booleans(),
    type(None): st.none(),
}


def values_of(annotation):
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return values_of(members[0])
    if isinstance(annotation, types.UnionType):
        return st.one_of([values_of(member) for member in members])
    if typing.get_origin(annotation) is tuple:
        return st.lists(values_of(members[0]), max_size=4).map(tuple)
    if typing.get_origin(annotation) is dict:
        inner = _STATUS if members[1] is typing.Any else values_of(members[1])
        return st.dictionaries(st.text(max_size=8), inner, max_size=3)
    return instances_of(annotation)


def instances_of(struct):
    fields = {f.name: values_of(f.type) for f in msgspec.structs.fields(struct)}
    return st.builds(struct, **fields)


requests = st.one_of([instances_of(kind) for kind in REQUEST_TYPES])
replies = st.one_of([instances_of(kind) for kind in REPLY_TYPES])
