import pytest
import torch
from tiny import install

from mptrain import files


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The tests' own recipes and family, one thread, and an empty working directory, which is returned."""
    monkeypatch.setattr(files, "folder", install.folder)
    monkeypatch.chdir(tmp_path)
    install.family()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)
