"""Keys made from arguments: `"charge:{order_id}"`.

The database renders the same templates for jobs that came by plain SQL, so what a placeholder may
be and how it is written is the same on both sides: a top-level argument that is a string, an
integer or a boolean in JSON, written as `->>` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pgqueue.model.encoding import checked_text

MAX_KEY_BYTES = 255

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class KeyTemplate:
    """A key with placeholders; what one task's keys are made from."""

    text: str
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        checked_text("a key template", self.text, 4 * MAX_KEY_BYTES)
        names = tuple(_PLACEHOLDER.findall(self.text))
        if re.search(r"[{}]", _PLACEHOLDER.sub("", self.text)) or not all(
            name.isidentifier() for name in names
        ):
            raise ValueError(f"{self.text!r} is not a key template: write {{name}} for an argument's value")
        object.__setattr__(self, "names", names)

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse a placeholder that is no argument.

        Raises:
            ValueError: there is one; names it.
        """
        known = list(known)
        for name in self.names:
            if name not in known:
                raise ValueError(
                    f"{self.text!r} names {name!r}, which is no argument ({', '.join(known) or 'none'})"
                )

    def render(self, encoded: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        """Give the key for these encoded arguments.

        Raises:
            ValueError: an argument cannot be part of a key, or the key is too long.
        """
        parts = {name: self._part(name, encoded, defaults) for name in self.names}
        key = _PLACEHOLDER.sub(lambda match: parts[match[1]], self.text)
        return checked_text(f"the key {self.text!r}", key, MAX_KEY_BYTES)

    def _part(self, name: str, encoded: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        if name in encoded:
            value = encoded[name]
        elif name in defaults:
            value = defaults[name]
        else:
            raise ValueError(f"the key {self.text!r} needs the argument {name!r}")
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (str, int)):
            return str(value)
        raise ValueError(
            f"the key {self.text!r} needs a string, an integer or a boolean for {name!r}, not {value!r:.40}"
        )
