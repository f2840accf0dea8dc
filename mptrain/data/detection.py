"""The detection data sets by name: composite, trees, voc, synthetic."""

from mptrain.data import composites, rectangles, trees, voc
from mptrain.data.boxes import DetectionSet
from mptrain.data.dataset import DataSpec
from mptrain.errors import UserError


def load(
    spec: DataSpec, size: int, classes: int, square: bool, train_years: tuple[int, ...], train_difficult: bool
) -> tuple[DetectionSet, DetectionSet]:
    """Training and test set of `data=composite | trees | voc | synthetic`.

    `size` is the side of a picture in pixels; VOC photographs are squeezed to it if `square` and keep their size
    otherwise. Raises UserError if the name is unknown, the folder is missing, or the classes are not `classes` many.
    """
    sets: tuple[DetectionSet, DetectionSet]
    if spec.name == "composite":
        sets = composites.load(size)
    elif spec.name == "trees":
        sets = trees.load(size)
    elif spec.name == "voc":
        sets = voc.load(spec.folder, train_years, size if square else None, train_difficult)
    elif spec.name == "synthetic":
        sets = rectangles.load(size, classes, spec.seed)
    else:
        raise UserError(f"data={spec.name} has no boxes; detection takes data=composite, trees, voc or synthetic")
    if (found := len(sets[0].classes)) != classes:
        raise UserError(f"data={spec.name} has {found} classes, not task.classes={classes}; type task.classes={found}")
    return sets
