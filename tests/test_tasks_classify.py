import math

import numpy as np
import pytest
import torch
from torch import nn

from mptrain import tasks
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.tasks.classify import Classify, build

RESNET = "mptrain.models.preact_resnet:preact_resnet8"


class Fixed(nn.Module):
    """Gives the logits that it is fed as pictures."""

    def __init__(self, auxiliary: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__()
        self.auxiliary = auxiliary

    def forward(self, pictures):
        return (pictures, *self.auxiliary) if self.training and self.auxiliary else pictures


def synthetic() -> Classify:
    return build(DataSpec("synthetic"), model=RESNET)


def test_loss_is_the_mean_cross_entropy_in_fp32() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float16)
    task = Classify(Fixed(), label_smoothing=0.0, aux_weight=0.0, margin=0.01)
    ((name, loss),) = task.losses((logits, torch.tensor([0, 1])))
    assert name == "model"
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-2)) + math.log(2)) / 2, rel=1e-6)


def test_smoothing_mixes_in_the_uniform_distribution() -> None:
    task = Classify(Fixed(), label_smoothing=0.2, aux_weight=0.0, margin=0.01)
    ((_, loss),) = task.losses((torch.tensor([[3.0, 0.0]]), torch.tensor([0])))
    right, wrong = math.log(1 + math.exp(-3)), 3 + math.log(1 + math.exp(-3))
    assert loss.item() == pytest.approx(0.9 * right + 0.1 * wrong, rel=1e-6)


def test_auxiliary_classifiers_count_by_their_weight() -> None:
    even = torch.zeros(1, 4)
    task = Classify(Fixed((even, even)), label_smoothing=0.0, aux_weight=0.3, margin=0.01)
    ((_, loss),) = task.losses((torch.zeros(1, 4), torch.tensor([2])))
    assert loss.item() == pytest.approx(1.6 * math.log(4), rel=1e-6)


def test_evaluation_counts_over_the_whole_set() -> None:
    logits = torch.eye(8)[[0, 1, 2, 3, 4, 5]]
    labels = torch.tensor([0, 1, 2, 3, 7, 7])
    task = Classify(Fixed(), label_smoothing=0.1, aux_weight=0.0, margin=0.01)
    scores = task.evaluate([(logits[:4], labels[:4]), (logits[4:5], labels[4:5]), (logits[5:], labels[5:])])
    assert scores["top1"] == 4 / 6
    assert scores["top5"] >= scores["top1"]
    right, wrong = math.log(math.e + 7) - 1, math.log(math.e + 7)
    assert scores["loss"] == pytest.approx((4 * right + 2 * wrong) / 6, rel=1e-6)


def test_top5_needs_more_than_five_classes() -> None:
    task = Classify(Fixed(), label_smoothing=0.0, aux_weight=0.0, margin=0.01)
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1]])
    assert task.evaluate([(logits, torch.tensor([4]))])["top5"] == 1.0
    assert task.evaluate([(logits, torch.tensor([5]))])["top5"] == 0.0
    assert "top5" not in task.evaluate([(logits[:, :5], torch.tensor([4]))])


def test_evaluation_is_the_same_for_every_batch_size() -> None:
    torch.manual_seed(0)
    task = synthetic()
    network = task.models["model"].eval()
    with torch.no_grad():
        results = [task.evaluate(batches(task.test_set, size)) for size in (1, 7, 64)]
    assert len({result["top1"] for result in results}) == 1
    assert len({result["top5"] for result in results}) == 1
    assert [r["loss"] for r in results] == pytest.approx([results[0]["loss"]] * 3, rel=1e-5)
    assert not network.training


def test_a_last_batch_of_one_is_counted() -> None:
    task = synthetic()
    batch = task.train_set.__getitems__(BatchKey(np.array([5]), (0,), first=False, train=True))
    assert task.size(batch) == 1
    ((_, loss),) = task.losses(batch)
    assert torch.isfinite(loss)


def test_a_few_steps_learn_the_synthetic_pictures() -> None:
    torch.manual_seed(0)
    task = synthetic()
    network = task.models["model"]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for position, indices in enumerate(task.train_set.epoch(32, np.random.default_rng(0))):
        for _, loss in task.losses(task.train_set.__getitems__(BatchKey(indices, (0, 0, position), False, True))):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        assert task.evaluate(batches(task.test_set, 64))["top1"] > 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "mptrain.models.preact_resnet"}, "package.module:function"),
        ({"model": "torch.nn:Flatten"}, "num_classes"),
        ({"model": RESNET, "channels": 3}, "takes 1 channels"),
        ({"model": RESNET, "channels": 2}, "takes 1 channels"),
        ({"model": RESNET, "classes": 1}, "task.classes=1"),
        ({"model": RESNET, "label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"model": RESNET, "aux_weight": -1.0}, "aux_weight"),
        ({"model": RESNET, "augment": "mixup"}, "random_resized_crop"),
        ({"model": RESNET, "classes": 12}, "set task.classes=10"),
    ],
)
def test_mistakes_are_explained(options, said) -> None:
    with pytest.raises(UserError, match=said):
        build(DataSpec("fashion"), **options)


def test_unknown_data_is_explained() -> None:
    with pytest.raises(UserError, match="fashion, imagenet, synthetic"):
        build(DataSpec("cifar"), model=RESNET)


@pytest.mark.parametrize("name", ["fashion", "synthetic"])
def test_a_folder_in_vain(name, tmp_path):
    with pytest.raises(UserError, match=rf"data_dir={tmp_path} has no effect, data={name} reads no folder"):
        tasks.build("classify", DataSpec(name, tmp_path), model=RESNET)
