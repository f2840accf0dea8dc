"""What is trained: one file a family, found by its name."""

import importlib
import importlib.util
import inspect
import pkgutil

from mptrain.data.dataset import DataSpec
from mptrain.errors import UserError
from mptrain.tasks.task import Task


def build(name: str, data: DataSpec, **options) -> Task:
    """Builds the task of `mptrain/tasks/<name>.py`.

    Raises UserError if there is no such file, if it does not take one of the options, or if it has no use for a folder.
    """
    if name not in (known := sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "task")):
        raise UserError(f"task.name={name} is unknown; there are {', '.join(known)}")
    builder = importlib.import_module(f"{__name__}.{name}").build
    try:
        inspect.signature(builder).bind(data, **options)
    except TypeError as error:
        raise UserError(f"task {name}: {error}") from error
    task: Task = builder(data, **options)
    data.refuse_a_folder_in_vain()
    return task
