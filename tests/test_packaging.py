"""What is installed is what is needed: yaml files travel with the package, and every import is declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))
IMPORTED_AS = {"hydra-core": "hydra", "pyyaml": "yaml", "pillow": "PIL", "vl-convert-python": "vl_convert"}
"""Packages whose module has another name."""


def declared() -> set[str]:
    listed = PROJECT["project"]["dependencies"] + [
        line for extra in ("faces", "report") for line in PROJECT["project"]["optional-dependencies"][extra]
    ]
    names = [re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in listed]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.parametrize("folder", ["configs", "recipes"])
def test_yaml_files_travel_with_the_package(folder):
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"][folder] == f"mptrain/{folder}"
    assert not (TOP / "mptrain" / folder).exists()


def test_every_import_is_declared():
    known = declared() | set(sys.stdlib_module_names) | {"mptrain"}
    for path in (TOP / "mptrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in modules:
                assert module.split(".")[0] in known, f"{path} imports {module}, which pyproject.toml does not name"
