"""Networks of Keras 3 by its own export, and of TensorFlow by tf2onnx."""

import os

os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"})

import files
import keras
import tensorflow as tf
import tf2onnx
from files import sizes, tensor

L = keras.layers
PICTURE = tensor("B", 64, 64, 3)
PICTURES = sizes("B H W", (1, 64, 96), (3, 64, 96), (1, 32, 64))
WORDS = tensor("B", "T", dtype="int32", draw="integers", low=5, high=1000)
LENGTHS = sizes("B T", (1, 12), (3, 12), (1, 33))


def export(make):
    def write(path):
        keras.utils.set_random_seed(0)
        network = make()
        zeros = [tf.zeros([size or 32 for size in each.shape], each.dtype) for each in network.inputs]
        network(zeros if len(zeros) > 1 else zeros[0])  # a network that was never called is not exported
        network.export(str(path), format="onnx", verbose=False)

    return write


def application(name, **options):
    return lambda: getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10, **options)


def recurrent():
    return keras.Sequential([
        L.Input((None,), dtype="int32"), L.Embedding(1000, 32), L.Bidirectional(L.LSTM(32, return_sequences=True)),
        L.GRU(32), L.Dense(5, activation="softmax"),
    ])  # fmt: skip


def masked():
    return keras.Sequential(
        [L.Input((None,), dtype="int32"), L.Embedding(1000, 32, mask_zero=True), L.LSTM(32), L.Dense(5)]
    )


def perceptron():
    return keras.Sequential([
        L.Input((20,)), L.Normalization(mean=0.0, variance=1.0), L.Dense(64, activation="gelu"),
        L.BatchNormalization(), L.Dropout(0.2), L.Dense(3, activation="softmax"),
    ])  # fmt: skip


def transformer():
    taken = L.Input((None,), dtype="int32")
    x = L.Embedding(1000, 64)(taken)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(4, 16)(x, x))
    x = L.LayerNormalization()(x + L.Dense(64)(L.Dense(128, activation="gelu")(x)))
    return keras.Model(taken, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def unet():
    taken = L.Input((64, 64, 3))
    a = L.Conv2D(16, 3, padding="same", activation="relu")(taken)
    b = L.Conv2D(32, 3, strides=2, padding="same", activation="swish")(a)
    c = L.SeparableConv2D(64, 3, strides=2, padding="same")(b)
    u = L.Concatenate()([L.UpSampling2D(interpolation="bilinear")(c), b])
    u = L.Conv2DTranspose(16, 3, strides=2, padding="same")(u)
    return keras.Model(taken, L.Conv2D(1, 1, activation="sigmoid")(L.Concatenate()([u, a])))


def two_inputs():
    numbers, kind = L.Input((4,), name="numbers"), L.Input((1,), dtype="int32", name="kind")
    x = L.Dense(32, activation="relu")(L.Concatenate()([numbers, L.Flatten()(L.Embedding(50, 8)(kind))]))
    return keras.Model([numbers, kind], [L.Dense(1, activation="sigmoid", name="p")(x), L.Dense(1, name="v")(x)])


def wavenet():
    taken = x = L.Input((None, 8))
    for gap in (1, 2, 4):
        y = L.Conv1D(16, 3, padding="causal", dilation_rate=gap, activation="relu")(x)
        x = L.Add()([y, L.Conv1D(16, 1)(x)])
    return keras.Model(taken, L.Dense(4)(x))


def film():
    taken = L.Input((8, 32, 32, 3))
    x = L.TimeDistributed(L.Conv2D(8, 3, strides=2, activation="relu"))(taken)
    return keras.Model(taken, L.Dense(4)(L.LSTM(16)(L.TimeDistributed(L.GlobalMaxPooling2D())(x))))


KERAS = {  # name -> model, inputs, what is asked
    "mobilenet_v2": (application("MobileNetV2", alpha=0.35), {"input": PICTURE}, None),
    "resnet50v2": (application("ResNet50V2"), {"input": PICTURE}, None),
    "efficientnet_v2": (application("EfficientNetV2B0"), {"input": PICTURE}, None),
    "densenet": (application("DenseNet121"), {"input": PICTURE}, None),
    "convnext": (application("ConvNeXtTiny"), {"input": PICTURE}, None),
    "recurrent": (recurrent, {"input": WORDS}, LENGTHS),
    "masked": (masked, {"input": WORDS}, LENGTHS),
    "perceptron": (perceptron, {"input": tensor("B", 20)}, None),
    "transformer": (transformer, {"input": WORDS}, LENGTHS),
    "unet": (unet, {"input": PICTURE}, None),
    "two_inputs": (two_inputs, {"numbers": tensor("B", 4),
                                "kind": tensor("B", 1, dtype="int32", draw="integers", high=50)}, None),
    "wavenet": (wavenet, {"input": tensor("B", "T", 8)}, LENGTHS),
    "film": (film, {"input": tensor("B", 8, 32, 32, 3)}, None),
}  # fmt: skip
for name, (make, inputs, asks) in KERAS.items():
    files.add(f"keras_{name}", export(make), inputs, asks, packages=["keras"])


def of_tensorflow(make, *specs):
    def write(path):
        tf.random.set_seed(0)
        signature = [tf.TensorSpec(shape, dtype, name=name) for name, shape, dtype in specs]
        tf2onnx.convert.from_function(
            tf.function(make(), input_signature=signature), input_signature=signature, opset=18, output_path=str(path)
        )

    return write


def best_three():
    weights = tf.random.normal((16, 8)).numpy()

    def f(x):
        y = tf.nn.relu(x @ weights)
        values, indices = tf.math.top_k(y, 3)
        return {"values": values, "indices": indices, "shares": tf.nn.softmax(y)}

    return f


def pictures():
    network = keras.applications.MobileNetV3Small(weights=None, input_shape=(64, 64, 3), classes=10)
    return lambda x: network(tf.cast(x, tf.float32), training=False)


def attention():
    weights = [(tf.random.normal((32, 32)) / 6).numpy() for _ in range(4)]

    def split(x):
        return tf.transpose(tf.reshape(x, (tf.shape(x)[0], tf.shape(x)[1], 4, 8)), (0, 2, 1, 3))

    def f(x):
        q, k, v = (split(tf.einsum("btc,cd->btd", x, w)) for w in weights[:3])
        y = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 8**0.5), v)
        y = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (tf.shape(x)[0], tf.shape(x)[1], 32))
        return tf.einsum("btc,cd->btd", y, weights[3])

    return f


def resized():
    kernel = tf.random.normal((3, 3, 3, 8)).numpy()

    def f(x):
        x = tf.image.resize(x, (32, 32), method="bilinear") / 127.5 - 1.0
        return tf.reduce_mean(tf.nn.relu6(tf.nn.conv2d(x, kernel, 2, "SAME")), (1, 2))

    return f


files.add("tf_best_three", of_tensorflow(best_three, ("x", (None, 16), tf.float32)), {"x": tensor("B", 16)})
files.add("tf_mobilenet_v3", of_tensorflow(pictures, ("x", (None, 64, 64, 3), tf.float32)), {"x": PICTURE})
files.add(
    "tf_attention", of_tensorflow(attention, ("x", (None, None, 32), tf.float32)), {"x": tensor("B", "T", 32)}, LENGTHS
)
files.add("tf_resized", of_tensorflow(resized, ("x", (None, None, None, 3), tf.float32)),
          {"x": tensor("B", "H", "W", 3, high=255, draw="uniform")}, PICTURES)  # fmt: skip
if __name__ == "__main__":
    files.main("tensorflow", ["tf2onnx", "tensorflow-cpu", "onnx"])
