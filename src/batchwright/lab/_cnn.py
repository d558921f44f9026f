"""A small convolutional network whose normalisation does not depend on the batch."""

from __future__ import annotations

from torch import nn

_CHANNELS = (16, 32)
_CHANNELS_PER_GROUP = 4
# The last map is averaged to this side, whatever the size of the image.
_SIDE = 4


def make_cnn(num_channels: int, num_outputs: int) -> nn.Module:
    """Return two convolutions of 3 × 3 and a linear layer.

    GroupNorm in place of BatchNorm: each example is normalised alone, so that the size of a batch, which the lab
    varies, changes nothing but the average of gradients.
    """
    first, second = _CHANNELS
    return nn.Sequential(
        nn.Conv2d(num_channels, first, kernel_size=3, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.GroupNorm(first // _CHANNELS_PER_GROUP, first),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size=3, padding=1),
        nn.GroupNorm(second // _CHANNELS_PER_GROUP, second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(_SIDE),
        nn.Flatten(),
        nn.Linear(second * _SIDE**2, num_outputs),
    )
