"""Which application a command means: --app, PGQUEUE_APP, or pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pgqueue.errors import ConfigurationError


def configured_application(given: str | None) -> str | None:
    """Give the name from the option (or its variable), else from `[tool.pgqueue]` in ./pyproject.toml."""
    if given:
        return given
    try:
        settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"pyproject.toml cannot be read: {error}") from None
    found = settings.get("tool", {}).get("pgqueue", {}).get("app")
    if found is not None and not isinstance(found, str):
        raise ConfigurationError('pyproject.toml: [tool.pgqueue] app must be a text like "shop.jobs:app"')
    return found


def application_name(given: str | None) -> str:
    """Give the application's name, or say how to give one.

    Raises:
        ConfigurationError: nobody named one.
    """
    found = configured_application(given)
    if not found:
        raise ConfigurationError(
            "which application? give --app package.module:attribute, set PGQUEUE_APP, "
            "or write app under [tool.pgqueue] in pyproject.toml"
        )
    return found
