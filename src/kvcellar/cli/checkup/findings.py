"""What an examination found. Used by all of them."""

from typing import NamedTuple

__all__ = ["Finding", "State", "note", "ok", "problem"]


class State:
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    PROBLEM = "problem"
    """Something does not work, or will not."""


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: what, in a word or two.
        state: see `State`.
        found: what is so.
        fix: what to type or do; empty where nothing is to be done.
    """

    name: str
    state: str
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(name, State.OK, found)


def note(name: str, found: str, fix: str = "") -> Finding:
    """Return something worth knowing."""
    return Finding(name, State.NOTE, found, fix)


def problem(name: str, found: str, fix: str) -> Finding:
    """Return something that is wrong, and what to do."""
    return Finding(name, State.PROBLEM, found, fix)
