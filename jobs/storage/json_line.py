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
        """Read `to_json` back; `msgspec.ValidationError` if it is something else."""
        return msgspec.json.decode(text, type=cls)
