"""Read flags without surprises: no abbreviations, no guesses, and errors that say the fix.

The command line is compared with two lists: the settings of `ServerConfig`, and the flags of a
foreign product that a command also answers to, each with its verdict. Values stay text here;
`config.load` checks them. Used for `kvcellar server` and, with LMCache's flags, for
`lmcache server`.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError

__all__ = ["FlagValues", "ForeignFlag", "Takes", "Verdict", "read_flags", "suggestion"]


class Takes:
    """How many values a flag has."""

    NONE = 0
    ONE = 1
    MANY = 2


class Verdict:
    """What happens to a foreign flag."""

    NOTED = "noted"
    """Accepted; one line says why it means nothing here."""
    REFUSED = "refused"
    """Not accepted; the error says why."""


class ForeignFlag(msgspec.Struct, frozen=True):
    """A flag of another product.

    Attributes:
        name: as it is written.
        verdict: see `Verdict`.
        reason: the rest of the sentence that begins with the flag and its value.
        takes: see `Takes`.
        fine: values that say what kvcellar does anyway: accepted without a word.
    """

    name: str
    verdict: str
    reason: str
    takes: int = Takes.ONE
    fine: tuple[str, ...] = ()


class FlagValues(msgspec.Struct, frozen=True):
    """What a command line said.

    Attributes:
        given: text by field name, for the settings that were given.
        notes: one line for each foreign flag that was accepted and means nothing.
    """

    given: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_flags(
    arguments: Sequence[str],
    settings: Sequence[Setting],
    *,
    program: str,
    foreign: Sequence[ForeignFlag] = (),
) -> FlagValues:
    """Return what a command line says.

    Prints the help and raises SystemExit(0) for `--help`.

    Args:
        arguments: what follows the command's name.
        settings: the flags that are our own.
        program: the command's name, for the help.
        foreign: flags that the command answers to as well.

    Raises:
        ConfigError: an unknown or refused flag, one without its value, or a stray word.
    """
    parser = _parser(settings, program, foreign)
    try:
        found, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error
    if unknown:
        raise ConfigError(_explain_unknown(unknown[0], settings, foreign))
    values: dict[str, object] = vars(found)
    given = {
        setting.field: tuple(str(text) for text in _as_list(values[setting.field]))
        for setting in settings
        if values[setting.field] is not None
    }
    return FlagValues(given, tuple(_notes(foreign, values)))


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return ' (did you mean …?)' for the known word that looks most like `word`, or ''."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


def _parser(
    settings: Sequence[Setting], program: str, foreign: Sequence[ForeignFlag]
) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, allow_abbrev=False, exit_on_error=False)
    for setting in settings:
        default = f" Default: {setting.default}." if setting.default else ""
        text = f"{setting.description}{' Required.' if setting.required else default}"
        text = text.replace("%", "%%")
        if setting.value:
            parser.add_argument(
                setting.flag,
                dest=setting.field,
                metavar=setting.value,
                action="append",
                nargs="+" if setting.value.endswith("…") else None,
                help=text,
            )
        else:
            parser.add_argument(
                setting.flag, dest=setting.field, action="store_true", default=None, help=text
            )
    for flag in foreign:
        if flag.takes == Takes.NONE:
            parser.add_argument(
                flag.name, dest=flag.name, action="store_true", default=None, help=argparse.SUPPRESS
            )
        else:
            parser.add_argument(
                flag.name,
                dest=flag.name,
                action="append",
                nargs="*" if flag.takes == Takes.MANY else None,
                help=argparse.SUPPRESS,
            )
    return parser


def _notes(foreign: Sequence[ForeignFlag], values: Mapping[str, object]) -> list[str]:
    notes = []
    for flag in foreign:
        value = values[flag.name]
        if value is None:
            continue
        words = [str(word) for word in _as_list(value)]
        if flag.takes == Takes.MANY and not words:
            continue
        if flag.fine and all(_is_one_of(word, flag.fine) for word in words):
            continue
        shown = flag.name if flag.takes == Takes.NONE else f"{flag.name} {' '.join(words)}".strip()
        if flag.verdict == Verdict.REFUSED:
            raise ConfigError(f"{shown}: {flag.reason}")
        notes.append(f"{shown} is accepted and changes nothing: {flag.reason}")
    return notes


def _is_one_of(word: str, fine: Sequence[str]) -> bool:
    """Return whether a value is one of these, as text or as a number."""
    if word in fine:
        return True
    try:
        return any(float(word) == float(value) for value in fine)
    except ValueError:
        return False


def _as_list(value: object) -> list[object]:
    """Flatten what argparse gives for repeated flags with several values."""
    if not isinstance(value, list):
        return [value]
    return [part for item in value for part in _as_list(item)]


def _explain_unknown(word: str, settings: Sequence[Setting], foreign: Sequence[ForeignFlag]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is no flag: everything here is written as --name value"
    name = word.partition("=")[0]
    known = [setting.flag for setting in settings] + [flag.name for flag in foreign]
    return f"{name} is not a flag of this command{suggestion(name, known) or ' (see --help)'}"
