"""Read a `summary.json` that nobody vouches for: strict JSON, bounded in size, every field of the right type."""

import json
import math
import os
import stat
from datetime import UTC, datetime
from typing import Any

LARGEST_SUMMARY = 5_000_000  # bytes
LONGEST_LABEL = 200  # characters; labels decide what is compared with what, so a longer one is refused, not cut
LONGEST_REASON = 300  # characters; reasons are only shown, so a longer one is cut
LONGEST_FOLDER = 1000  # characters of a path
LARGEST_NUMBER = 1e100  # keeps sums and squares of anything accepted finite
MOST_KEY_FIELDS = 40


class BadSummary(Exception):
    """The summary does not say what a summary has to say; the text names the field."""


def clean(text: str, longest: int = LONGEST_REASON) -> str:
    """One printable line of at most `longest` characters, without control or direction characters."""
    if len(text) <= longest and text.isprintable() and "  " not in text:
        return text.strip()
    text = "".join(character if character.isprintable() else " " for character in text[: 4 * longest])
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def load(path: str) -> Any:
    """The JSON value in a plain file; BadSummary if it is a link, too large, not UTF-8 or not strict JSON."""
    about = os.lstat(path)
    if not stat.S_ISREG(about.st_mode):
        raise BadSummary("is a link or another special file; only plain files are read")
    if about.st_size > LARGEST_SUMMARY:
        raise BadSummary(f"has {about.st_size / 1e6:.1f} MB; a summary has at most {LARGEST_SUMMARY / 1e6:.0f} MB")
    with open(path, "rb") as file:
        content = file.read(LARGEST_SUMMARY + 1)
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise BadSummary("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadSummary(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError):
        raise BadSummary("is JSON with a number too long or a nesting too deep to read") from None


def _refuse_constant(name: str) -> Any:
    raise BadSummary(f"is not strict JSON: it holds a bare {name}; null is meant")


def number_or_none(value: Any) -> float | None:
    """What a stranger's file gives for a number; None if it is none, not finite, or too large to be squared."""
    return float(value) if type(value) in (int, float) and abs(value) < LARGEST_NUMBER else None


class Fields:
    """Typed access to one JSON object; every complaint names the field by its full path."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise BadSummary(f"{path.rstrip('.') or 'the file'} should be an object, got {_shown(value)}")
        self.mapping: dict[str, Any] = value
        self.path = path

    def _get(self, name: str, what: str, optional: bool) -> Any:
        if name not in self.mapping and not optional:
            raise BadSummary(f"lacks {self.path}{name} ({what})")
        return self.mapping.get(name)

    def _wrong(self, name: str, what: str, value: Any) -> BadSummary:
        return BadSummary(f"{self.path}{name} should be {what}, got {_shown(value)}")

    def inner(self, name: str) -> "Fields":
        return Fields(self._get(name, "an object", False), f"{self.path}{name}.")

    def text(self, name: str, optional: bool = False, longest: int | None = LONGEST_LABEL) -> str:
        value = self._get(name, "a text", optional)
        if value is None and optional:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        if longest is not None and len(value) > longest:
            raise BadSummary(f"{self.path}{name} has {len(value)} characters; at most {longest} are read")
        cleaned = clean(value)
        if not cleaned and not optional:
            raise BadSummary(f"{self.path}{name} is empty")
        return cleaned

    def whole(self, name: str) -> int:
        value = self._get(name, "a whole number", False)
        if type(value) is not int or abs(value) >= 2**64:
            raise self._wrong(name, "a whole number", value)
        return value

    def flag(self, name: str) -> bool:
        value = self._get(name, "true or false", False)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def required_number(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise self._wrong(name, "a number", None)
        return value

    def number(self, name: str, optional: bool = False) -> float | None:
        value = self._get(name, "a number", False)
        if value is None and optional:
            return None
        if (number := number_or_none(value)) is None:
            raise self._wrong(name, "a finite number" + (" or null" if optional else ""), value)
        return number

    def moment(self, name: str) -> datetime:
        value = self.text(name)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise self._wrong(name, "an ISO date and time", value) from None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def scalars(self) -> dict[str, str | int | float | bool | None]:
        if len(self.mapping) > MOST_KEY_FIELDS:
            raise BadSummary(
                f"{self.path.rstrip('.')} has {len(self.mapping)} fields; at most {MOST_KEY_FIELDS} are read"
            )
        result: dict[str, str | int | float | bool | None] = {}
        for name, value in self.mapping.items():
            if isinstance(value, str):
                value = self.text(name, optional=True)
            elif type(value) is float and not math.isfinite(value) or not isinstance(value, int | float | bool | None):
                raise self._wrong(clean(name, 40), "a text, number, true, false or null", value)
            elif type(value) is int:
                value = self.whole(name)
            result[clean(name, 40)] = value
        return result


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if type(value) is int and abs(value) >= 2**64:
        return "a number beyond all bounds"
    return clean(json.dumps(value), 40)
