"""Who may import whom: arrows point down, and no wing reaches into another."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mptrain"
FILES = sorted(PACKAGE.rglob("*.py"))
EVERYBODY = {"mptrain", "mptrain.errors"}
ALLOWED = {  # wing -> what of mptrain it may import, itself apart; `errors` is everybody's
    "precision": {"files"},
    "tasks": {"models", "data", "files"},
    "models": {"files"},
    "data": {"files"},
    "watch": {f"precision.{name}" for name in ("formats", "counting", "blocks", "graph", "dispatch")},
    "results": {"files", "paper", "watch.histogram", "precision.policy"},
    "files": set(),
    "about": set(),
    "options": set(),
    "paper": {"files"},
    "process": set(),
    "gpus": set(),
    "memory": set(),
    "hollow": {"recall"},
    "recall": set(),
    "layout": {"config", "precision"},
    "roofline": {"gpus", "precision"},
    "growth": {"gpus", "roofline"},
    "config": {"files", "options", "paper", "precision.modes"},
    "optim": {"files", "options"},
    "measure": {"precision", "memory"},
    "progress": {"config", "results.record", "watch.events"},
    "observe": {"config", "progress", "results.record", "watch"},
    "jobs": {"results.record"},
    "durations": {"paper", "plan", "results"},
    "parallel": set(),
    "sharding": {"parallel", "optim", "precision.storage"},
    "batchnorm": {"parallel"},
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            whole = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if is_module(name) else node.module for name in whole}
    return found


def is_module(name: str) -> bool:
    where = PACKAGE.parent.joinpath(*name.split("."))
    return where.with_suffix(".py").exists() or (where / "__init__.py").exists()


def wing(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    mine = wing(path)
    if mine not in ALLOWED:
        return
    for name in imports(path):
        if name.split(".")[0] != "mptrain" or name in EVERYBODY:
            continue
        other = name.removeprefix("mptrain.")
        allowed = ALLOWED[mine] | {mine}
        assert any(other == a or other.startswith(f"{a}.") for a in allowed), f"{path} may not import {name}"


def test_the_table_above_knows_every_wing():
    verbs = {
        "cli",
        "compose",
        "train",
        "rerun",
        "state",
        "outcome",
        "doctor",
        "evaluate",
        "reproduce",
        "plan",
        "errors",
        "__init__",
        "__main__",
    }
    assert {wing(path) for path in FILES} - verbs <= ALLOWED.keys() | {
        "probe",
        "probe_words",
        "estimate",
        "estimate_words",
    }


def test_only_the_door_knows_hydra():
    for path in FILES:
        if wing(path) not in ("cli", "compose", "config"):
            assert not {name for name in imports(path) if name.split(".")[0] in ("hydra", "omegaconf")}, path


def test_records_and_tables_need_no_torch():
    for path in FILES:
        if wing(path) == "results" and path.name != "checkpoint.py":
            assert not {name for name in imports(path) if name.split(".")[0] == "torch"}, path


@pytest.mark.parametrize("name", ["alarms", "underflow", "histogram", "store"])
def test_reading_what_was_watched_needs_no_torch(name):
    names = imports(PACKAGE / "watch" / f"{name}.py")
    assert {n for n in names if n.startswith("mptrain")} <= {
        "mptrain.errors", "mptrain.watch.histogram", "mptrain.watch.underflow"
    }  # fmt: skip
    assert not {n for n in names if n.split(".")[0] == "torch"}


def test_families_never_mention_a_precision():
    for path in FILES:
        if wing(path) in ("tasks", "models", "data"):
            text = path.read_text(encoding="utf-8")
            for word in ("autocast", "float16", "bfloat16", ".half(", "GradScaler", "loss_scale"):
                assert word not in text, f"{path} mentions {word}"


def test_no_circles():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {other for other in top_level_imports(path) if other.startswith("mptrain")}
    done: set[str] = set()

    def visit(name, above):
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in graph.get(name, ()):
                if other != name:
                    visit(other, [*above, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def top_level_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if is_module(name) else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


@pytest.mark.parametrize("module", ["mptrain.cli", "mptrain.config", "mptrain.results.table", "mptrain.results.record"])
def test_torch_stays_out(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules; assert 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)
