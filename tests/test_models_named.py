import fnmatch
import re
import sys

import pytest
from torch import nn

from mptrain import files, models
from mptrain.errors import UserError
from mptrain.models.preact_resnet import preact_resnet8
from mptrain.precision import policy

MINE = """
from torch import nn
def network(num_classes): return nn.Linear(4, num_classes)
def nothing(num_classes): return {}
def fails(num_classes):
    raise KeyError("no\\nsuch")
def another(width): return nn.Linear(4, width)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_a_test.py").write_text(MINE)
    (tmp_path / "broken_for_a_test.py").write_text("import math\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])  # as a console script finds it
    yield tmp_path
    for name in ("mine_for_a_test", "broken_for_a_test"):
        sys.modules.pop(name, None)


def test_a_network_of_the_current_folder(folder):
    before = list(sys.path)
    assert isinstance(models.build("mine_for_a_test:network", num_classes=3), nn.Linear)
    assert sys.path == before


@pytest.mark.parametrize(
    ("path", "message"),
    {
        "mine_for_a_test": "does not name a network; write package.module:function",
        "mine_for_a_test:missing": "module mine_for_a_test has no function missing",
        "nowhere_for_a_test:f": r"No module named 'nowhere_for_a_test'\); it is looked for .* in the current folder",
        "broken_for_a_test:f": r"cannot be imported \(ValueError: math domain error, .*broken_for_a_test.py:2\)",
        "mine_for_a_test:another": r"must be callable as function\(num_classes=3\)",
        "mine_for_a_test:fails": r"num_classes=3\), failed: KeyError: 'no.*such', .*mine_for_a_test.py:6$",
        "mine_for_a_test:nothing": r"returned dict; let it return a torch.nn.Module",
        "builtins:dict": "returned dict",
    }.items(),
)
def test_what_is_no_network_is_said(folder, path, message):
    with pytest.raises(UserError, match=message):
        models.build(path, num_classes=3)


def test_modules_that_the_documents_name_are_there():
    """Whoever types an example of theirs with recipe resnet is not told that there is no such module."""
    root = files.folder("recipes").parent
    shown = ["README.md", "recipes/README.md", "mptrain/cli.py", "configs/config.yaml"]
    text = " ".join((root / name).read_text(encoding="utf-8") for name in shown)
    examples = re.findall(r"(?:keep_fp32=|watch\.layers=|e\.g\. )\[([^]]*)\]", text)
    paths = [path for path, _ in preact_resnet8().named_modules()]
    assert len(examples) >= 6
    for pattern in ",".join(examples).replace('"', "").split(","):
        assert pattern in policy.FUNCTIONS or fnmatch.filter(paths, pattern), pattern
