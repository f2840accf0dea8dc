"""The building block that the Inception networks share."""

from torch import nn

Size = int | tuple[int, int]


class ConvNormReLU(nn.Sequential):
    """A convolution without bias, batch norm and ReLU; takes the convolution's arguments."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )
