import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.tasks import clip

SMALL = {
    "size": 16,
    "patch": 8,
    "image_width": 16,
    "image_layers": 1,
    "image_heads": 2,
    "words": 40,
    "length": 8,
    "text_width": 16,
    "text_layers": 1,
    "text_heads": 2,
    "dimension": 8,
}


def build(**options):
    torch.manual_seed(0)
    return clip.build(DataSpec("synthetic", None, 0), **SMALL | options)


def evaluate(task, batch_size):
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(batches(task.test_set, batch_size))


def test_ranks_by_hand():
    logits = torch.tensor([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3], [0.8, 0.7, 0.1]])
    assert clip.ranks(logits).tolist() == [1, 2, 3]
    assert clip.ranks(logits.T).tolist() == [1, 2, 3]


def test_ties_and_nan_count_as_worse():
    assert clip.ranks(torch.zeros(4, 4)).tolist() == [4] * 4
    assert clip.ranks(torch.full((4, 4), math.nan)).tolist() == [4] * 4


def test_loss_by_hand():
    logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    rows = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-2))) / 2
    columns = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-3))) / 2
    assert clip.contrastive_loss(logits).item() == pytest.approx((rows + columns) / 2)


def test_training_loss_is_that_of_scaled_cosines_in_fp32():
    task = build()
    batch = task.train_set.__getitems__(BatchKey(np.arange(6), (0, 0, 0), True, True))
    ((name, loss),) = task.losses(batch)
    pictures, captions = task.model.image(batch["pictures"]), task.model.text(batch["words"], batch["lengths"])
    cosines = F.cosine_similarity(pictures[:, None], captions[None], dim=-1)
    assert name == "model" and loss.dtype == torch.float32
    torch.testing.assert_close(loss, clip.contrastive_loss(cosines / 0.07))


@pytest.mark.parametrize("options", [{}, {"tower": "convnet", "norm": "batch", "image_layers": 2}])
def test_no_evaluation_batch_size_matters(options):
    task = build(**options)
    one, seven, all_at_once = (evaluate(task, batch_size) for batch_size in (1, 7, 64))
    assert one == pytest.approx(all_at_once, rel=1e-4) and seven == pytest.approx(all_at_once, rel=1e-4)
    assert one["recall@10"] == pytest.approx((one["picture_to_caption@10"] + one["caption_to_picture@10"]) / 2)


def test_it_learns_to_find_captions():
    task = build(image_width=32, text_width=32, dimension=32)
    before = evaluate(task, 64)["recall@10"]
    optimizer = torch.optim.Adam(task.model.parameters(), 1e-3)
    rng = np.random.default_rng(0)
    for epoch in range(20):
        for position, indices in enumerate(task.train_set.epoch(64, rng)):
            ((_, loss),) = task.losses(
                task.train_set.__getitems__(BatchKey(indices, (0, epoch, position), False, True))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert before < 0.12 and evaluate(task, 64)["recall@10"] > 0.5


def test_spoilt_running_statistics_show_as_no_recall_at_all():
    task = build(tower="convnet", norm="batch", image_layers=2)
    norm = next(module for module in task.model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.running_mean.fill_(math.nan)
    found = evaluate(task, 64)
    assert found["recall@10"] == 0 and math.isnan(found["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": "resnet"}, "task.tower=resnet is unknown; type task.tower=vit or task.tower=convnet"),
        ({"stem": "resnet"}, "task.stem=resnet is unknown; type task.stem=patch or task.stem=convolutions"),
        ({"pool": "max"}, "task.pool=max is unknown; type task.pool=token or task.pool=mean"),
        ({"stem": "convolutions", "image_width": 20}, "task.patch=8 must be 2, 4, 8 or 16"),
        ({"norm": "batch"}, "task.norm=batch does not go with task.tower=vit"),
        ({"tower": "convnet", "norm": "none"}, "task.norm=none is unknown; type task.norm=batch"),
        ({"tower": "convnet", "image_width": 12}, "task.image_width=12 must be a multiple of 8"),
        ({"tower": "convnet", "image_layers": 5}, "task.image_layers=5"),
        ({"patch": 5}, "task.size=16 must be a multiple of task.patch=5"),
        ({"text_heads": 3}, "task.text_width=16 must be a multiple of task.text_heads=3"),
        ({"length": 2}, "task.length=2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)
