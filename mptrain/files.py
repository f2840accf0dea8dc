"""Where the yaml files are: beside the package in a checkout, inside it in a wheel."""

import difflib
from pathlib import Path
from typing import Any

from mptrain.errors import UserError

_PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """The folder `configs` or `recipes`."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def names(kind: str) -> list[str]:
    """All recipes ("recipe") or precisions ("precision"), found by glob."""
    where = folder("recipes") if kind == "recipe" else folder("configs") / kind
    return sorted(path.stem for path in where.glob("*.yaml"))


def config(kind: str, name: str) -> Path:
    """The file of a recipe or precision; raises UserError with near matches if there is none."""
    if name not in (known := names(kind)):
        raise UserError(f"{kind}={name} is unknown; {suggest(name, known)}")
    return (folder("recipes") if kind == "recipe" else folder("configs") / kind) / f"{name}.yaml"


def suggest(given: str, known: list[str]) -> str:
    """`did you mean x?` where something is near, and all that is allowed."""
    near = difflib.get_close_matches(given, known, n=2)
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"there are {', '.join(known) or 'none'}"


def read_yaml(path: Path) -> dict[str, Any]:
    """A yaml file as plain data; raises UserError if it cannot be read or is not a mapping."""
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as yaml: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a yaml mapping")
    return content
