"""Marking pixels and telling ink: targets, losses and scores by hand."""

import pytest
import torch
import torch.nn.functional as F

from mptrain import tasks
from mptrain.data.dataset import DataSpec
from mptrain.errors import UserError


def made(**options):
    return tasks.build("segment", DataSpec("synthetic", None, 0), width=2, image_size=8, **options)


def normalised(task, pixels):
    return (pixels / 255 - task.mean) / task.std


def test_targets_are_the_pixels_of_the_file():
    task = made()
    pixels = torch.zeros(2, 1, 8, 8)
    pixels[0, 0, 2, 3], pixels[1, 0, 0, :2] = 1.0, torch.tensor([255.0, 10.0])
    kinds, ink, most = task.targets(normalised(task, pixels), torch.tensor([4, 9]))
    assert kinds[0, 2, 3] == 5 and kinds[1, 0, :3].tolist() == [10, 10, 0] and int((kinds > 0).sum()) == 3
    assert ink.tolist() == [1.0, 265.0] and most == 255 * 64
    kinds, ink, most = made(ink="share").targets(normalised(task, pixels), torch.tensor([4, 9]))
    assert ink.tolist() == pytest.approx([1 / 16320, 265 / 16320]) and most == 1


class Fixed(torch.nn.Module):
    def __init__(self, marks, number):
        super().__init__()
        self.marks, self.told = marks, number

    def forward(self, pictures):
        return self.marks, self.told


def test_losses_and_scores():
    task = made()
    pixels = torch.zeros(2, 1, 8, 8)
    pixels[:, 0, :4] = 100.0
    pictures, labels = normalised(task, pixels), torch.tensor([0, 1])
    marks = torch.zeros(2, 11, 8, 8)
    marks[:, 1, :4], marks[:, 0, 6:] = 9.0, 9.0  # all ink is said to be of the first class; two rows of four are empty
    task.models = {"model": Fixed(marks, torch.zeros(2))}
    ((name, loss),) = task.losses((pictures, labels))
    kinds = torch.zeros(2, 8, 8, dtype=torch.long)
    kinds[0, :4], kinds[1, :4] = 1, 2
    expected = F.cross_entropy(marks, kinds) + (0.5 * 255 * 64 - 3200) ** 2
    assert name == "model" and loss.item() == pytest.approx(expected.item())
    assert task.size((pictures, labels)) == 2
    scores = task.evaluate([(pictures, labels)])
    # where no logit is highest, the first one counts: the background
    assert scores == pytest.approx({"marked": 0.5, "background": 1.0, "ink_error": 0.5 - 3200 / 16320})


def test_both_ends_share_the_first_block():
    model = made().models["model"]
    marks, number = model(torch.randn(3, 1, 8, 8))
    assert marks.shape == (3, 11, 8, 8) and number.shape == (3,)
    number.sum().backward()
    reached = {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {"stem", "number"}


@pytest.mark.parametrize(("options", "said"), [({"ink": "wet"}, "raw, share"), ({"classes": 1}, "at least 2")])
def test_mistakes_are_told(options, said):
    with pytest.raises(UserError, match=said):
        made(**options)
