"""Plain networks, a chain of layers without branches: a multilayer perceptron, AlexNet, VGG-16 and Tiny YOLOv2.

AlexNet (Krizhevsky 2014, one column) and VGG-16 (Simonyan and Zisserman 2014) are as torchvision builds them. Their
classifier needs an image of fixed size; at 224 x 224 the adaptive pooling before it becomes a 1x1 AveragePool when
exported, and the dropout disappears. Tiny YOLOv2 (Redmon and Farhadi 2016) is for the 20 classes of Pascal VOC, without
the decoding of boxes.
"""

from gangway.zoo.graph import GraphBuilder, ModelGraph

MLP_WIDTHS = (16, 64, 64, 10)

ALEXNET_CONVS = (  # channels, kernel, stride, padding, pooling behind it
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions; pooling behind each stage
HIDDEN = 4096

YOLO_CHANNELS = (16, 32, 64, 128, 256, 512, 1024, 1024)
YOLO_POOL_STRIDES = (2, 2, 2, 2, 2, 1)  # behind the first six convolutions
YOLO_BOXES, YOLO_CLASSES = 5, 20
YOLO_OUTPUTS = YOLO_BOXES * (YOLO_CLASSES + 5)  # per box: centre, size, objectness, classes
YOLO_LEAK = 0.1


def mlp(seed: int) -> ModelGraph:
    """input [N, 16] -> two hidden layers with ReLU -> output [N, 10]."""
    net = GraphBuilder("mlp", seed)
    x = "input"
    last = len(MLP_WIDTHS) - 1
    for layer in range(1, last):
        x = net.dense(x, f"fc{layer}", MLP_WIDTHS[layer - 1], MLP_WIDTHS[layer])
        x = net.node("Relu", [x], f"relu{layer}")
    net.dense(x, "output", MLP_WIDTHS[last - 1], MLP_WIDTHS[last])
    return net.finish({"input": MLP_WIDTHS[:1]}, {"output": MLP_WIDTHS[last:]})


def alexnet(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("alexnet", seed)
    x, channels = "input", 3
    for index, (outputs, kernel, stride, padding, pooling) in enumerate(ALEXNET_CONVS):
        x = net.conv(x, f"conv{index}", (channels, outputs), kernel, stride, padding=padding, bias=True)
        x = net.node("Relu", [x], f"relu{index}")
        if pooling:
            x = net.max_pool(x, f"pool{index}", kernel=3, stride=2)
        channels = outputs
    return _classify(net, x, channels * 6 * 6)


def vgg16(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("vgg16", seed)
    x, channels = "input", 3
    for stage, (outputs, convolutions) in enumerate(VGG16_STAGES):
        for index in range(convolutions):
            name = f"stage{stage}.{index}"
            x = net.conv(x, f"{name}.conv", (channels, outputs), kernel=3, bias=True)
            x = net.node("Relu", [x], f"{name}.relu")
            channels = outputs
        x = net.max_pool(x, f"stage{stage}.pool", kernel=2, stride=2)
    return _classify(net, x, channels * 7 * 7)


def _classify(net: GraphBuilder, x: str, features: int) -> ModelGraph:
    x = net.node("AveragePool", [x], "avgpool", kernel_shape=[1, 1], strides=[1, 1])
    x = net.node("Flatten", [x], "flatten", axis=1)
    for index, inputs in enumerate((features, HIDDEN)):
        x = net.node("Relu", [net.dense(x, f"fc{index}", inputs, HIDDEN)], f"fc{index}.relu")
    net.dense(x, "output", HIDDEN, 1000)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def tiny_yolov2(seed: int) -> ModelGraph:
    """input [N, 3, 416, 416] -> grid [N, 125, 13, 13]."""
    net = GraphBuilder("tiny_yolov2", seed)
    x, channels = "input", 3
    for index, outputs in enumerate(YOLO_CHANNELS):
        x = net.conv(x, f"conv{index}", (channels, outputs), kernel=3)
        x = net.node("LeakyRelu", [net.batch_norm(x, f"bn{index}", outputs)], f"leaky{index}", alpha=YOLO_LEAK)
        if index < len(YOLO_POOL_STRIDES):
            x = _pool_same(net, x, f"pool{index}", YOLO_POOL_STRIDES[index])
        channels = outputs
    net.conv(x, "grid", (channels, YOLO_OUTPUTS), kernel=1, bias=True)
    return net.finish({"input": (3, 416, 416)}, {"grid": (YOLO_OUTPUTS, 13, 13)})


def _pool_same(net: GraphBuilder, x: str, name: str, stride: int) -> str:
    """2x2 maximum; with stride 1 the size stays, for which ONNX pads below and to the right."""
    return net.node("MaxPool", [x], name, kernel_shape=[2, 2], strides=[stride, stride], auto_pad="SAME_UPPER")
