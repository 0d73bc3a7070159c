"""The text of a schedule as a source of places: decoding, lines, and the findings made while it is read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commplan.errors import CommplanError, Related, Span, Violation

MAX_FILE_BYTES: Final = 64 * 1024
"""Longest schedule that is read.  The longest of the library is a fiftieth of it."""

_BYTE_ORDER_MARKS: Final = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32"))
_FORBIDDEN: Final = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Source:
    """A text and the name of the file that messages give it."""

    file: str
    text: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, text: str, file: str) -> Source:
        """The source of `text`: a byte order mark is dropped, every line ends in a line feed."""
        text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        return cls(file, text, tuple(text.split("\n")))

    def span(self, start: int, end: int) -> Span:
        """The place of `text[start:end]`; of several lines, the part on the first."""
        start = min(start, len(self.text))
        line = self.text.count("\n", 0, start)
        column = start - (self.text.rfind("\n", 0, start) + 1)
        text = self.lines[line]
        shown = text[column : column + max(end - start, 1)].rstrip()
        return Span(self.file, line + 1, column + 1, max(len(shown), 1), text)


@dataclass(frozen=True, slots=True)
class Findings:
    """Collects violations of one source while it is read."""

    source: Source
    violations: list[Violation] = field(default_factory=list)

    def add(self, code: str, message: str, at: Span, hint: str, related: tuple[Related, ...] = ()) -> None:
        """Note an error, and in `hint` what to write instead; reading goes on."""
        self.violations.append(Violation(code, message, at, hint, related=related))


def check_text(source: Source, findings: Findings) -> None:
    """Find what keeps a text from being read as YAML at all: its size (CP004) and its characters (CP002)."""
    size = len(source.text.encode("utf-8", "surrogatepass"))
    if size > MAX_FILE_BYTES:
        message = f"a schedule has at most {MAX_FILE_BYTES} bytes, this file has more"
        findings.add("CP004", message, source.span(0, 0), "is it a schedule? One takes a few lines, for any number of modules")
        return
    for match in _FORBIDDEN.finditer(source.text):
        findings.add(
            "CP002",
            f"the character U+{ord(match[0]):04X} may not stand in a schedule",
            source.span(match.start(), match.end()),
            "delete it; write text files as UTF-8 without control characters",
        )


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The first `limit_bytes` bytes of a file, and one more where there are more.

    Raises:
        CommplanError: if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise CommplanError(f"cannot read {shown(str(path), 200)}: {reason}") from error


def decode(data: bytes, file: str) -> tuple[str, Violation | None]:
    """Text of `data`, and what is wrong with its encoding: nothing but UTF-8 is read."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return "", Violation("CP002", f"the file is {encoding}, not UTF-8", Span(file, 1, 1), "save it as UTF-8")
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        before = Source.of(data[: error.start].decode("utf-8"), file)
        line = data[error.start :].split(b"\n", 1)[0].decode("utf-8", "replace")
        at = Span(file, len(before.lines), len(before.lines[-1]) + 1, 1, before.lines[-1] + line)
        return "", Violation("CP002", f"the byte 0x{data[error.start]:02X} is not UTF-8", at, "save the file as UTF-8")


def load_text(path: str | Path, limit_bytes: int, what: str) -> str:
    """The text of a file that should hold `what` ("a profile"), without a byte order mark.

    Raises:
        CommplanError: it can't be read, is larger than `limit_bytes`, or is no UTF-8.
    """
    data = read_bytes(Path(path), limit_bytes)
    if len(data) > limit_bytes:
        raise CommplanError(f"{path}: larger than {limit_bytes >> 20} MiB, so hardly {what}")
    text, unreadable = decode(data, str(path))
    if unreadable is not None:
        raise CommplanError(f"{path}: {unreadable.message}; {unreadable.hint}")
    return text.removeprefix("\ufeff")


def shown(text: str, length: int = 40) -> str:
    """`text` quoted for a message: escaped, and cut to about `length` characters."""
    return repr(text if len(text) <= length else text[: length - 3] + "...")


def closest(word: str, known: Iterable[str]) -> str:
    """The hint that offers the closest of `known`; "" where none is close."""
    lowered = {w.lower(): w for w in sorted(set(known), reverse=True)}
    close = difflib.get_close_matches(word[:64].lower(), lowered, n=1)
    return f"did you mean {lowered[close[0]]}?" if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint that offers the closest of `known`, or the list of them where none is close; "" where there are none."""
    words = sorted(set(known))
    return closest(word, words) or (f"expected {alternatives(words)}" if words else "")


def alternatives(words: Iterable[str], conjunction: str = "or") -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} {conjunction} {last}" if most else last
