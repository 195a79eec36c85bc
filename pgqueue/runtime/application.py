"""Loading the user's application: `package.module:attribute` names an App."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from pgqueue.app import App
from pgqueue.errors import ConfigurationError


class ApplicationError(ConfigurationError):
    """The application could not be loaded; `details` is its own traceback, when it has one."""

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)


def load_application(spec: str) -> App:
    """Import the App that `package.module:attribute` names; the working directory is searched too.

    Without an attribute, `app` is taken.

    Raises:
        ApplicationError: no such module, an error while importing it, or no App there.
    """
    module_name, _, attribute = spec.partition(":")
    attribute = attribute or "app"
    if not module_name:
        raise ApplicationError(f"{spec!r} names no application; give --app package.module:attribute")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ApplicationError(
                f"no module {error.name!r} for --app {spec}; run from the project's folder, or install it"
            ) from None
        raise _failed(spec, error) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _failed(spec, error) from error
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ApplicationError(f"module {module_name!r} has no {attribute!r} for --app {spec}")
    if not isinstance(found, App):
        raise ApplicationError(f"{spec} is a {type(found).__name__}, not a pgqueue.App")
    return found


def _failed(spec: str, error: BaseException) -> ApplicationError:
    # Only the user's own frames: how we imported their module tells them nothing.
    first = error.__traceback__
    while first is not None and _is_import_machinery(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    frames = traceback.format_exception(type(error), error, first)
    return ApplicationError(f"importing {spec} failed: {type(error).__name__}: {error}", "".join(frames))


def _is_import_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib") or file == importlib.__file__
