"""Plain data as one line of JSON: in the log of a table, or in a column."""

from typing import Self

import msgspec


class JsonLine:
    """A dataclass that can be written as one line, and read back with its types checked."""

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a line of `to_json` back; raise `msgspec.ValidationError` if a field is missing or of another type."""
        return msgspec.json.decode(text, type=cls)
