"""Networks that torchvision and torchaudio lack, one file each, and the one way to name any network."""

import importlib
from collections.abc import Callable

from mptrain.errors import UserError


def load(path: str) -> Callable:
    """Returns the function or class that `package.module:name` stands for.

    Raises UserError if the path has another form, the module cannot be imported or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"'{path}' does not name a network; write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"'{path}': module {module_name} cannot be imported ({error})") from error
    if not callable(found := getattr(module, name, None)):
        raise UserError(f"'{path}': module {module_name} has no function {name}")
    return found
