"""Detection: boxes and classes of the objects in a picture (the paper's section 4.2, table 2)."""

from collections.abc import Sequence
from pathlib import Path

from mptrain import models
from mptrain.data import detection
from mptrain.data.dataset import DataSpec
from mptrain.errors import UserError
from mptrain.models.yolo import YOLO
from mptrain.tasks.detect.objectness import Objectness
from mptrain.tasks.detect.single_shot import SingleShot
from mptrain.tasks.detect.two_stage import TwoStage
from mptrain.tasks.task import Task

NORMALISATIONS = ("mean", "positives", "objectness")
FITTING = "task.model={}: an SSD takes task.normalise=mean or positives, a YOLO objectness, a Faster R-CNN null"


def build(
    data: DataSpec,
    model: str,
    size: int,
    classes: int,
    normalise: str | None = None,
    backbone: str | None = None,
    train_years: Sequence[int] = (2007,),
    train_difficult: bool = True,
) -> Task:
    """A single-shot or two-stage detector, whichever `model` is.

    `normalise` (single-shot only) divides the loss by all its terms (`mean`) or by the default boxes with an object
    (`positives`, SSD's own); `objectness` is YOLO's, by all for the objectness and by those with an object for the
    rest. `backbone` is a file with VGG-16's pretrained weights. `train_years` and `train_difficult`
    concern VOC. Raises UserError if an option does not fit.
    """
    if normalise not in (None, *NORMALISATIONS):
        allowed = ", task.normalise=".join(NORMALISATIONS)
        raise UserError(f"task.normalise={normalise} is unknown; type task.normalise={allowed}")
    if size < 1 or classes < 1:
        raise UserError(f"task.size={size} and task.classes={classes} have to be at least 1")
    single_shot = normalise is not None
    if (normalise in ("mean", "positives")) != models.takes(models.load(model), classes, size, background=True):
        raise UserError(FITTING.format(model))
    train_set, test_set = detection.load(data, size, classes, single_shot, tuple(train_years), train_difficult)
    weights = Path(backbone) if backbone else None
    if normalise in ("mean", "positives"):
        return SingleShot(models.build(model, classes, size, normalise == "positives", weights), train_set, test_set)
    network = models.build(model, classes, size, weights)
    if isinstance(network, YOLO) != single_shot:
        raise UserError(FITTING.format(model))
    return (Objectness if single_shot else TwoStage)(network, train_set, test_set)
