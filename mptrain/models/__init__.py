"""Networks that torchvision and torchaudio lack, one file each, and the one way to name any network."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mptrain.errors import UserError


def load(path: str) -> Callable:
    """Returns the function or class that `package.module:name` stands for; a module may lie in the current folder.

    Raises UserError if the path has another form, the module cannot be imported or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"'{path}' does not name a network; write package.module:function")
    with _current_folder():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UserError(
                f"'{path}': module {module_name} cannot be imported ({_said(error)}); it is looked for in the "
                "environment, in PYTHONPATH and in the current folder"
            ) from error
    if not callable(found := getattr(module, name, None)):
        raise UserError(f"'{path}': module {module_name} has no function {name}")
    return found


def build(path: str, *arguments: Any, **options: Any) -> Any:
    """The torch.nn.Module that the function makes; raises UserError if it fails, or makes something else."""
    function = load(path)
    call = ", ".join([*(repr(a) for a in arguments), *(f"{key}={value!r}" for key, value in options.items())])
    if not takes(function, *arguments, **options):
        raise UserError(f"task.model={path} must be callable as function({call})")
    try:
        network = function(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.model={path}, called as function({call}), failed: {_said(error)}") from error
    if not isinstance(network, nn.Module):
        raise UserError(
            f"task.model={path}, called as function({call}), returned {type(network).__name__}; "
            "let it return a torch.nn.Module"
        )
    return network


def takes(function: Callable, *arguments: Any, **options: Any) -> bool:
    """Whether it may be called so; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


@contextmanager
def _current_folder() -> Iterator[None]:
    """Modules of the current folder can be imported, after all others: a console script does not look there."""
    sys.path.append(folder := os.getcwd())
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.reverse()
            sys.path.remove(folder)
            sys.path.reverse()


def _said(error: Exception) -> str:
    """What went wrong and where: the file and line that raised it."""
    skipped = ("<frozen", importlib.__file__, __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skipped)]
    place = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}".replace("\n", " ")
