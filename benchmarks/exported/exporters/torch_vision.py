"""Networks of torchvision and timm."""

import files
import timm
import torchvision
from files import sizes, tensor
from torch import nn
from torch_files import DYNAMO, TORCHSCRIPT, Picked, add
from torchvision.models import convnext, densenet, maxvit, swin_transformer, vision_transformer


def zoo(name, **options):
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def small_convnext():
    setting = convnext.CNBlockConfig
    return convnext.ConvNeXt([setting(16, 32, 1), setting(32, 64, 1), setting(64, 64, 1), setting(64, None, 1)])


def small_swin(block=None):
    options = {} if block is None else {"block": block, "downsample_layer": swin_transformer.PatchMergingV2}
    return swin_transformer.SwinTransformer([4, 4], 24, [2, 2, 2], [2, 4, 8], [7, 7], **options)


def small_swin_v2():
    return small_swin(swin_transformer.SwinTransformerBlockV2)


def small_vit():
    return vision_transformer.VisionTransformer(224, 16, 3, 4, 96, 192)


def small_maxvit():
    return maxvit.MaxVit((128, 128), 16, 4, [16, 32], [1, 1], 8, 0.0)


def small_densenet():
    return densenet.DenseNet(8, (2, 2, 2, 2), 16)


PICTURE = tensor("B", 3, 224, 224, draw="normal")
ANY_PICTURE = tensor("B", 3, "H", "W", draw="normal")
TWO_SIZES = sizes("B H W", (1, 64, 96), (3, 64, 96), (1, 96, 128), (2, 96, 128))
CLASSIFIERS = {
    "resnet18": zoo("resnet18"),
    "mobilenet_v2": zoo("mobilenet_v2"),
    "mobilenet_v3_small": zoo("mobilenet_v3_small"),
    "efficientnet_b0": zoo("efficientnet_b0"),
    "convnext": small_convnext,
    "swin": small_swin,
    "swin_v2": small_swin_v2,
    "vit": small_vit,
    "densenet": small_densenet,
    "shufflenet": zoo("shufflenet_v2_x0_5"),
    "squeezenet": zoo("squeezenet1_1"),
    "regnet": zoo("regnet_y_400mf"),
    "mnasnet": zoo("mnasnet0_5"),
}
for name, make in CLASSIFIERS.items():
    add(f"tv_{name}", make, {"input": PICTURE}, ["output"], packages=["torchvision"])
for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext", "swin", "vit", "shufflenet"):
    add(f"ts_{name}", CLASSIFIERS[name], {"input": PICTURE}, ["output"], by=TORCHSCRIPT, packages=["torchvision"])
add("tv_maxvit", small_maxvit, {"input": tensor("B", 3, 128, 128)}, ["output"], packages=["torchvision"])
for name in ("resnet18", "mobilenet_v3_small"):  # both kinds of global pooling
    add(f"tv_{name}_hw", zoo(name), {"input": ANY_PICTURE}, ["output"], TWO_SIZES, packages=["torchvision"])
add("tv_resnet18_axes", zoo("resnet18"), {"input": PICTURE}, ["output"], packages=["torchvision"],
    dynamic_shapes=None, dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}})  # fmt: skip
add("tv_resnet18_fixed", zoo("resnet18"), {"input": tensor(1, 3, 224, 224)}, ["output"], [{}], packages=["torchvision"])
add("tv_mobilenet_v2_four", zoo("mobilenet_v2"), {"input": tensor(4, 3, 96, 96)}, ["output"], [{}],
    packages=["torchvision"])  # fmt: skip


def segmentation(name):
    return lambda: Picked(zoo(name, weights_backbone=None)(), ["out"])


for start, by in (("tv", DYNAMO), ("ts", TORCHSCRIPT)):
    for name, network in (("deeplab", "deeplabv3_mobilenet_v3_large"), ("lraspp", "lraspp_mobilenet_v3_large")):
        add(f"{start}_{name}", segmentation(network), {"input": ANY_PICTURE}, ["out"], TWO_SIZES, by=by,
            packages=["torchvision"])  # fmt: skip
add("tv_fcn", segmentation("fcn_resnet50"), {"input": ANY_PICTURE}, ["out"], TWO_SIZES, packages=["torchvision"])


class OnePicture(nn.Module):
    """A detector whose list of pictures has one."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, image):
        found = self.module([image])[0]
        return found["boxes"], found["scores"], found["labels"]


def detector(name):
    return lambda: OnePicture(zoo(name, weights_backbone=None)())


for name, network in (  # torch.export does not take them
    ("fasterrcnn", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    ("ssdlite", "ssdlite320_mobilenet_v3_large"),
):
    add(f"ts_{name}", detector(network), {"image": tensor(3, 320, 320, draw="uniform")},
        ["boxes", "scores", "labels"], [{}], by=TORCHSCRIPT, fixed=("any",), packages=["torchvision"])  # fmt: skip
add("tv_r3d", zoo("r3d_18"), {"clip": tensor("B", 3, 8, 32, 32)}, ["output"], packages=["torchvision"])

TIMM = {  # network -> size of the picture, options that make it shallow
    "mobilenetv4_conv_small": (128, {}),
    "efficientvit_b0": (128, {}),
    "efficientvit_m0": (224, {}),
    "fastvit_t8": (256, {}),
    "convnextv2_atto": (128, {}),
    "repvit_m0_9": (128, {}),
    "eva02_tiny_patch14_224": (224, {"depth": 3}),
    "deit3_small_patch16_224": (224, {"depth": 3}),
    "swinv2_cr_tiny_ns_224": (224, {"depths": (1, 1, 2, 1), "embed_dim": 48}),
    "edgenext_xx_small": (128, {}),
    "ghostnetv2_100": (128, {}),
    "levit_128s": (224, {}),
    "tf_efficientnetv2_b0": (128, {}),
    "vit_small_patch14_dinov2": (126, {"depth": 3, "img_size": 126}),
    "regnety_002": (128, {}),
    "hgnetv2_b0": (128, {}),
    "mambaout_femto": (128, {}),
    "coatnet_nano_rw_224": (224, {}),
    "mobilevit_xxs": (128, {}),
    "poolformer_s12": (128, {}),
    "xcit_nano_12_p16_224": (224, {"depth": 3}),
    "tiny_vit_5m_224": (224, {}),
    "pvt_v2_b0": (128, {}),
    "inception_next_atto": (128, {}),
    "res2net50_26w_4s": (128, {"layers": (1, 1, 1, 1)}),
}


def of_timm(name, options):
    return lambda: timm.create_model(name, pretrained=False, **options)


for name, (side, options) in TIMM.items():
    add(f"timm_{name}", of_timm(name, options), {"input": tensor("B", 3, side, side)}, ["output"], packages=["timm"])
add("timm_mobilenetv4_hw", of_timm("mobilenetv4_conv_small", {}), {"input": ANY_PICTURE}, ["output"], TWO_SIZES,
    packages=["timm"])  # fmt: skip
for name in ("mobilenetv4_conv_small", "convnextv2_atto", "levit_128s", "swinv2_cr_tiny_ns_224"):
    side, options = TIMM[name]
    add(f"ts_timm_{name}", of_timm(name, options), {"input": tensor("B", 3, side, side)}, ["output"], by=TORCHSCRIPT,
        packages=["timm"])  # fmt: skip
if __name__ == "__main__":
    files.main("torch", ["torch", "onnxscript"])
