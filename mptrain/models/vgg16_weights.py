"""VGG-16 trained on ImageNet, from a file: the network both of the paper's detectors start from."""

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import vgg16

from mptrain.errors import UserError


def read_vgg16(path: Path) -> dict[str, Tensor]:
    """The state dict of torchvision's vgg16 in a file; UserError if it is missing, damaged or of another network."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with torch.device("meta"):
            expected = vgg16().state_dict()
        for name, tensor in expected.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"task.backbone={path} does not hold the weights of torchvision's VGG-16 ({error!r}); write them with "
            "torch.save(torchvision.models.vgg16(weights='IMAGENET1K_V1').state_dict(), path)"
        ) from error
    return state


def fill_features(layers: list[nn.Module], state: dict[str, Tensor]) -> None:
    """Copies the pretrained convolutions into `layers`, which stand in the order of vgg16().features."""
    for position, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            fill(layer, state[f"features.{position}.weight"], state[f"features.{position}.bias"])


def fill(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor) -> None:
    layer.load_state_dict({"weight": weight, "bias": bias})
