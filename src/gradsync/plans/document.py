"""Data on disk that ranks must share: JSON with a digest of its content, and errors that name the field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Document(BaseModel):
    """Pure data as JSON text, with its digest; `noun` is what errors call it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    noun: ClassVar[str]
    by_lines: ClassVar[tuple[str, ...]]  # fields whose items have a line each in the text

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal on two ranks exactly if the documents are."""
        return _digest(self.model_dump(mode="json"))

    def to_json(self) -> str:
        """JSON text with the digest."""
        data = self.model_dump(mode="json")
        digest = _digest(data)
        lines = {key: _lines(data.pop(key)) for key in self.by_lines}
        head = json.dumps(data)[:-1]
        body = "".join(f',\n "{key}": {text}' for key, text in lines.items())
        return f'{head}{body},\n "digest": "{digest}"}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote. What was edited by hand must drop its digest.

        Raises:
            ValueError: naming the field and the reason.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the {cls.noun} is no JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"a {cls.noun} is a JSON object, got {type(data).__name__}")
        digest = data.pop("digest", None)
        try:
            document = cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or cls.noun
            raise ValueError(f"{cls.noun}, field {where}: {first['msg']} (got {str(first['input'])[:80]})") from None
        if digest is not None and digest != (found := _digest(data)):  # of what is written, as settings may be new
            raise ValueError(
                f"the {cls.noun} was changed after it was written: its digest says {str(digest)[:12]}, its content is "
                f"{found[:12]}; delete the digest line if the change was intended"
            )
        return document

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _digest(data: dict[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _lines(items: list[Any] | dict[str, Any]) -> str:
    """JSON with an item a line."""
    if isinstance(items, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in items.items()) + "}"
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "]"
