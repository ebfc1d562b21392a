"""A model that only GPUs are measured with."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, around which the input passes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width

        def convolution(i: int, o: int, size: int, stride: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(i, o, size, stride, padding=size // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(o))

        self.first = convolution(inputs, width, 1)
        self.middle = convolution(width, width, 3, stride)
        self.last = convolution(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.first(x).relu()).relu()
        out: torch.Tensor = (self.last(y) + self.around(x)).relu()
        return out


class ResNet50(nn.Module):
    """The shape of ResNet-50: 25.6 M parameters in 161 tensors, most of them small."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(count):
                stride = 2 if number == 0 and width > 64 else 1
                layers.append(Bottleneck(inputs, width, stride))
                inputs = 4 * width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.layers(x))
        return logits
