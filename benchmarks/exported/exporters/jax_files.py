"""Functions of JAX and networks of Flax by jax2onnx."""

import files
import jax
import jax.numpy as jnp
from files import sizes, tensor
from flax import nnx
from jax2onnx import to_onnx


class Network(nnx.Module):
    """Convolutions over pictures."""

    def __init__(self, rngs):
        self.a, self.c = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.b = nnx.BatchNorm(16, rngs=rngs, use_running_average=True)
        self.d = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.b(self.a(x))), window_shape=(2, 2), strides=(2, 2))
        return self.d(nnx.gelu(self.c(x)).mean((1, 2)))


class Words(nnx.Module):
    """Embedding, attention and a norm."""

    def __init__(self, rngs):
        self.embedding, self.norm = nnx.Embed(1000, 64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        x = self.embedding(x)
        return self.head(self.norm(x + self.attention(x)).mean(1))


def perceptron():
    a = jax.random.normal(jax.random.PRNGKey(0), (20, 64))
    b = jax.random.normal(jax.random.PRNGKey(1), (64, 3))
    return lambda x: jax.nn.softmax(jax.nn.gelu(x @ a) @ b)


def mixer():
    a = jax.random.normal(jax.random.PRNGKey(0), (16, 16)) / 4
    return lambda x: jnp.einsum("btc,cd->btd", jnp.swapaxes(jnp.tanh(jnp.swapaxes(x, 1, 2)), 1, 2), a).max(1)


def write(make, shape, dtype=None):
    def to(path):
        module = make(nnx.Rngs(0)) if isinstance(make, type) else make()
        taken = [shape] if dtype is None else [jax.ShapeDtypeStruct(shape, dtype)]
        to_onnx(module, taken, return_mode="file", output_path=str(path))

    return to


files.add("jax_perceptron", write(perceptron, ("B", 20)), {"in_0": tensor("B", 20)})
files.add("jax_mixer", write(mixer, ("B", 12, 16)), {"in_0": tensor("B", 12, 16)})
files.add("jax_mixer_any", write(mixer, ("B", "T", 16)), {"in_0": tensor("B", "T", 16)}, sizes("B T", (1, 8), (3, 20)))
files.add("flax_pictures", write(Network, ("B", 32, 32, 3)), {"in_0": tensor("B", 32, 32, 3)}, packages=["flax"])
files.add("flax_words", write(Words, (4, 16), jnp.int32),
          {"in_0": tensor(4, 16, dtype="int32", draw="integers", high=1000)}, [{}], packages=["flax"])  # fmt: skip
if __name__ == "__main__":
    files.main("jax2onnx", ["jax2onnx", "jax"])
