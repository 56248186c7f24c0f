"""Models of torchvision and timm, where these are installed: {name: (make the model, size of its images)}."""

import importlib

import pytest
import torch
from torch import nn


def of_torchvision(name, **keys):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    for part in name.split(".")[:-1]:
        models = importlib.import_module(f"{models.__name__}.{part}")
    return getattr(models, name.split(".")[-1])(weights=None, **keys)


def of_timm(name):
    return pytest.importorskip("timm", reason="timm is not installed").create_model(name)


NO_BACKBONE = {"weights_backbone": None}
_TORCHVISION = {
    "resnet50": ({}, 64),
    "resnext50_32x4d": ({}, 64),
    "vgg11_bn": ({}, 64),
    "densenet121": ({}, 64),
    "mobilenet_v2": ({}, 64),
    "mobilenet_v3_small": ({}, 64),
    "efficientnet_b0": ({}, 64),
    "mnasnet1_0": ({}, 64),
    "shufflenet_v2_x1_0": ({}, 64),
    "regnet_y_400mf": ({}, 64),
    "squeezenet1_1": ({}, 64),
    "googlenet": ({"aux_logits": False, "init_weights": False}, 64),
    "inception_v3": ({"aux_logits": False, "init_weights": False}, 96),
    "convnext_tiny": ({}, 64),
    "vit_b_16": ({"image_size": 64}, 64),
    "swin_t": ({}, 64),
    "segmentation.deeplabv3_resnet50": (NO_BACKBONE, 64),
    "segmentation.fcn_resnet50": (NO_BACKBONE, 64),
    "segmentation.lraspp_mobilenet_v3_large": (NO_BACKBONE, 64),
}
_TIMM = {
    "repvgg_a0": 64,
    "res2net50_26w_4s": 64,
    "seresnet18": 64,
    "cspdarknet53": 64,
    "levit_128s": 224,
    "mixer_s32_224": 224,
    "deit_tiny_patch16_224": 224,
    "fastvit_t8": 64,
    "dla34": 64,
    "skresnet18": 64,
}
NAMES = (*(f"torchvision {name}" for name in _TORCHVISION), *(f"timm {name}" for name in _TIMM))


def make(title):
    """(a model whose norms have statistics and weights that are not 0 or 1, images)."""
    package, name = title.split()
    torch.manual_seed(0)
    if package == "timm":
        model, size = of_timm(name), _TIMM[name]
    else:
        keys, size = _TORCHVISION[name]
        model = of_torchvision(name, **keys)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():  # the head of a ViT
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            for tensor, lowest in ((module.weight, 0.5), (module.running_var, 0.5)):
                nn.init.uniform_(tensor, lowest, 1.5)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor, std=0.1)
    return model.eval(), torch.randn(2, 3, size, size)
