"""Documents: JSON files that must be the same on all ranks, with a digest and errors that name the field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..costs.cluster import MOST_RANKS
from ..inputs.files import from_json, naming, read_as, read_text

Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class Document(BaseModel):
    """The base class of plans and profiles: a pydantic model, written as JSON with a SHA-256 digest of its content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    noun: ClassVar[str]  # what errors call the document, as "plan"
    by_lines: ClassVar[tuple[str, ...]]  # fields whose items have a line each in the JSON text

    version: int  # its default in a subclass is the only one that is read

    @field_validator("version")
    @classmethod
    def _is_read(cls, version: int) -> int:
        if version != (read := cls.model_fields["version"].default):
            raise ValueError(f"only version {read} can be read")
        return version

    @property
    def digest(self) -> str:
        """The SHA-256 of the canonical JSON: equal on two ranks exactly if the JSON is equal, in which 1 is not 1.0."""
        return _digest(self.model_dump(mode="json"))

    def to_json(self) -> str:
        """Returns the document as JSON text, with its digest, by which `from_json` notices changes."""
        data = self.model_dump(mode="json")
        digest = _digest(data)
        lines = {key: _lines(data.pop(key)) for key in self.by_lines}
        head = json.dumps(data)[:-1]
        body = "".join(f',\n "{key}": {text}' for key, text in lines.items())
        return f'{head}{body},\n "digest": "{digest}"}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the document that a JSON text describes; the digest must be deleted from a text edited by hand.

        Raises:
            ValueError: for text that is not JSON, has a key twice, or a number that is not finite; for a field that
                does not fit (with its name), or a wrong digest.
        """
        data = from_json(text, cls.noun)
        if not isinstance(data, dict):
            raise ValueError(f"a {cls.noun} is a JSON object, got {type(data).__name__}")
        if "version" not in data:
            raise ValueError(f"{cls.noun}, field version: Field required")
        is_signed, digest = "digest" in data, data.pop("digest", None)
        document = read_as(cls.model_validate_json, data, cls.noun)
        if is_signed and digest != (found := _digest(data)):  # `data`, as `document` may have new fields
            raise ValueError(
                f"the {cls.noun} was changed after it was written: its digest says {str(digest)[:12]}, its content is "
                f"{found[:12]}; delete the entry 'digest' if the change was intended"
            )
        return document

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a JSON file that `save` wrote, or that was written by hand, and returns its document.

        Raises:
            TypeError: if `path` is no path.
            ValueError: for a file that cannot be read, is not UTF-8, or larger than `inputs.files.MOST_BYTES`; for a
                text that `from_json` refuses. The error names the path.
        """
        text = read_text(path, cls.noun)
        with naming(path):
            return cls.from_json(text)

    def save(self, path: str | Path) -> None:
        """Writes the document as JSON to a file, overwriting it; `load` reads it."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _digest(data: dict[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _lines(items: list[Any] | dict[str, Any]) -> str:
    """Returns a list or a dict as JSON text with one line for each item."""
    if isinstance(items, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in items.items()) + "}"
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "]"
