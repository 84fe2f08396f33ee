"""Modules that people write themselves: recurrent, convolutional over time, transformers, encoders with decoders."""

import files
import torch
from files import mask, sizes, tensor, tokens
from torch import nn
from torch.nn import functional
from torch_files import DYNAMO, TORCHSCRIPT, add

LENGTHS = sizes("B T", (1, 12), (3, 12), (1, 33), (2, 33))
PICTURES = sizes("B H W", (1, 64, 96), (3, 64, 96), (1, 32, 64), (2, 32, 64))


class Tagger(nn.Module):
    """A recurrent network that tags words."""

    def __init__(self, kind=nn.LSTM, layers=2, both=True):
        super().__init__()
        self.embedding = nn.Embedding(1000, 32)
        self.recurrent = kind(32, 48, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(96 if both else 48, 10)

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0])


class Classifier(Tagger):
    """Classifies by the last state."""

    def forward(self, x):
        _, state = self.recurrent(self.embedding(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.head(last[-2:].transpose(0, 1).flatten(1))


class Streaming(nn.Module):
    """One step of a recurrent network, whose state the client keeps."""

    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(1, 16, 8, 4)
        self.recurrent = nn.LSTM(16, 32, 1, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, audio, h, c):
        features = torch.relu(self.front(audio.unsqueeze(1))).transpose(1, 2)
        out, (h, c) = self.recurrent(features, (h, c))
        return torch.sigmoid(self.head(out[:, -1])), h, c


class Transformer(nn.Module):
    """torch's own encoder, with a mask of what is padding, or of what is later."""

    def __init__(self, causal=False):
        super().__init__()
        self.embedding, self.causal = nn.Embedding(1000, 64), causal
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, x, mask):
        h = self.embedding(x)
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.head(self.encoder(h, mask=later, src_key_padding_mask=mask == 0, is_causal=self.causal))


class Series(nn.Module):
    """A transformer over series of numbers, without a mask."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(16, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.encoder(self.front(x)).mean(1))


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.both = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)
        self.head = nn.Linear(64, 1000)

    def forward(self, source, target):
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.both(self.embedding(source), self.embedding(target), tgt_mask=later, tgt_is_causal=True))


class Temporal(nn.Module):
    """Convolutions over time with growing gaps (a TCN)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(8 if n == 0 else 24, 24, 3, dilation=2**n))
            for n in range(4)
        )
        self.head = nn.Conv1d(24, 4, 1)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(functional.pad(x, (2 * 2**number, 0))))
        return self.head(x)


class Speech(nn.Module):
    """A front of 2-D convolutions and a conformer-like block: gated and depthwise convolutions over time."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.project = nn.Linear(8 * 9, 48)
        self.norm, self.point, self.depth = (
            nn.LayerNorm(48),
            nn.Conv1d(48, 96, 1),
            nn.Conv1d(48, 48, 7, padding=3, groups=48),
        )
        self.batch_norm, self.back = nn.BatchNorm1d(48), nn.Conv1d(48, 48, 1)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.head = nn.Linear(48, 30)

    def forward(self, x):
        h = self.front(x.unsqueeze(1))
        h = self.project(h.permute(0, 2, 1, 3).flatten(2))
        a = functional.glu(self.point(self.norm(h).transpose(1, 2)), 1)
        h = h + self.back(functional.silu(self.batch_norm(self.depth(a)))).transpose(1, 2)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return functional.log_softmax(self.head(h), -1)


class Recogniser(nn.Module):
    """A CRNN: columns of a picture are steps. CTC wants [time, batch, classes], which many export."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.front = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d((2, 1)),
            nn.Conv2d(32, 32, (8, 1)), nn.ReLU(),
        )  # fmt: skip
        self.recurrent = nn.LSTM(32, 32, 2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(64, 37)

    def forward(self, x):
        h = self.front(x).squeeze(2)
        h = h.permute(0, 2, 1) if self.batch_first else h.permute(2, 0, 1)
        return functional.log_softmax(self.head(self.recurrent(h)[0]), -1)


class Perceptron(nn.Module):
    """Probabilities and the label."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 3))

    def forward(self, x):
        scores = self.layers(x)
        return torch.softmax(scores, -1), scores.argmax(-1)


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self, up="transposed"):
        super().__init__()

        def block(taken, given):
            return nn.Sequential(nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU())

        self.a, self.b, self.c, self.d, self.e = block(3, 8), block(8, 16), block(16, 32), block(32, 16), block(24, 8)
        self.up = (
            nn.ConvTranspose2d(32, 16, 2, 2) if up == "transposed" else nn.Upsample(scale_factor=2, mode="bilinear")
        )
        self.narrow = nn.Identity() if up == "transposed" else nn.Conv2d(32, 16, 1)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(functional.max_pool2d(a, 2))
        c = self.c(functional.max_pool2d(b, 2))
        d = self.d(torch.cat([self.narrow(self.up(c)), b], 1))
        d = functional.interpolate(d, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return torch.sigmoid(self.out(self.e(torch.cat([d, a], 1))))


class Upscaler(nn.Module):
    """Super-resolution: pixels out of channels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 5, padding=2), nn.PReLU(16), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, x):
        return self.layers(x).clamp(0, 1)


class Straightener(nn.Module):
    """A spatial transformer: where pixels come from is computed."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(
            nn.Conv2d(1, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
        )
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        )

    def forward(self, x):
        grid = functional.affine_grid(self.where(x).view(-1, 2, 3), x.shape, align_corners=False)
        return self.body(functional.grid_sample(x, grid, align_corners=False))


class Twins(nn.Module):
    """Two towers whose angle is the answer."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(500, 16), nn.Embedding(800, 16)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 16))

    def forward(self, user, item):
        return functional.cosine_similarity(self.tower(self.users(user)), self.tower(self.items(item)), -1)


class Bags(nn.Module):
    """Mean of the embeddings of a bag of words, and of numbers beside them (a recommender)."""

    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.Embedding(500, 16, padding_idx=0), nn.Linear(20, 1)

    def forward(self, words, numbers):
        known = (words != 0).unsqueeze(-1).float()
        mean = (self.bag(words) * known).sum(1) / known.sum(1).clamp(min=1)
        return torch.sigmoid(self.head(torch.cat([mean, numbers], 1))).squeeze(1)


class Rotary(nn.Module):
    """A block of a language model: grouped queries, rotary positions, a causal mask, gates, RMS norms."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(1000, 64), nn.RMSNorm(64), nn.RMSNorm(64)
        self.q, self.k, self.v, self.o = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(64, 64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 16, 2) / 16))

    def turned(self, x):
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), self.frequencies)
        angles = torch.cat([angles, angles], -1)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def forward(self, x):
        h = self.embedding(x)
        n = self.norm(h)
        q, k, v = (
            f(n).unflatten(-1, (heads, 16)).transpose(1, 2) for f, heads in ((self.q, 4), (self.k, 2), (self.v, 2))
        )
        a = functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        h = h + self.o(a.transpose(1, 2).flatten(2))
        n = self.last(h)
        return h + self.down(functional.silu(self.gate(n)) * self.up(n))


class Mixture(nn.Module):
    """The best two of four experts for each row."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x):
        weight, which = self.router(x).softmax(-1).topk(2, -1)
        all_of_them = torch.stack([expert(x) for expert in self.experts], 1)
        return (all_of_them.gather(1, which.unsqueeze(-1).expand(-1, -1, 16)) * weight.unsqueeze(-1)).sum(1)


class Coder(nn.Module):
    """A convolutional autoencoder with a normalised code."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.ELU(), nn.Conv2d(8, 16, 4, 2, 1)
        )
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Hardswish(), nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x):
        code = functional.normalize(self.down(x), dim=1)
        return self.up(code), code


MODULES = {  # name -> module, inputs, outputs, what is asked
    "lstm": (Tagger, {"x": tokens("B", "T")}, ["y"], LENGTHS),
    "gru": (lambda: Tagger(nn.GRU, 1, False), {"x": tokens("B", "T")}, ["y"], LENGTHS),
    "rnn": (lambda: Tagger(nn.RNN, 1, True), {"x": tokens("B", "T")}, ["y"], LENGTHS),
    "lstm_last": (Classifier, {"x": tokens("B", "T")}, ["y"], LENGTHS),
    "transformer": (Transformer, {"x": tokens("B", "T"), "mask": mask("B", "T")}, ["y"], LENGTHS),
    "transformer_causal": (lambda: Transformer(True), {"x": tokens("B", "T"), "mask": mask("B", "T")}, ["y"], LENGTHS),
    "series": (Series, {"x": tensor("B", "T", 16)}, ["y"], LENGTHS),
    "translator": (Translator, {"source": tokens("B", "T"), "target": tokens("B", "S")}, ["y"],
                   sizes("B T S", (1, 12, 5), (3, 12, 5), (1, 33, 9))),
    "tcn": (Temporal, {"x": tensor("B", 8, "T")}, ["y"], LENGTHS),
    "speech": (Speech, {"x": tensor("B", "T", 40)}, ["y"], sizes("B T", (1, 64), (3, 64), (1, 101))),
    "crnn": (lambda: Recogniser(True), {"x": tensor("B", 1, 32, "W")}, ["y"], sizes("B W", (1, 64), (3, 64), (1, 100))),
    "crnn_ctc": (Recogniser, {"x": tensor("B", 1, 32, "W")}, ["y"], sizes("B W", (1, 64), (3, 64), (1, 100))),
    "mlp": (Perceptron, {"x": tensor("B", 20)}, ["p", "label"], None),
    "unet": (UNet, {"x": tensor("B", 3, "H", "W")}, ["mask"], PICTURES),
    "unet_upsample": (lambda: UNet("bilinear"), {"x": tensor("B", 3, "H", "W")}, ["mask"], PICTURES),
    "upscaler": (Upscaler, {"x": tensor("B", 3, "H", "W")}, ["y"], PICTURES),
    "straightener": (Straightener, {"x": tensor("B", 1, 32, 32)}, ["y"], None),
    "twins": (Twins, {"user": tokens("B", high=500), "item": tokens("B", high=500)}, ["score"], None),
    "bags": (Bags, {"words": tokens("B", "T", high=500), "numbers": tensor("B", 4)}, ["p"], LENGTHS),
    "rotary": (Rotary, {"x": tokens("B", "T")}, ["y"], LENGTHS),
    "mixture": (Mixture, {"x": tensor("B", 16)}, ["y"], None),
    "coder": (Coder, {"x": tensor("B", 3, "H", "W")}, ["y", "code"], PICTURES),
}  # fmt: skip
for name, (make, inputs, outputs, asks) in MODULES.items():
    if name != "rnn":  # whose length torch.export fixes
        add(f"nn_{name}", make, inputs, outputs, asks, by=DYNAMO)
    if name not in ("translator", "straightener", "rotary", "crnn_ctc"):
        add(f"ts_{name}", make, inputs, outputs, asks, by=TORCHSCRIPT)
add("ts_crnn_ctc", Recogniser, MODULES["crnn_ctc"][1], ["y"], MODULES["crnn_ctc"][3], by=TORCHSCRIPT,
    dynamic_axes={"x": {0: "B", 3: "W"}, "y": {0: "T", 1: "B"}})  # fmt: skip
add("ts_straightener", Straightener, MODULES["straightener"][1], ["y"], by=TORCHSCRIPT, opset_version=20)
add("nn_streaming", Streaming, {"audio": tensor("B", 512), "h": tensor(1, "B", 32), "c": tensor(1, "B", 32)},
    ["p", "hn", "cn"], by=DYNAMO)  # fmt: skip
add("ts_streaming", Streaming, {"audio": tensor("B", 512), "h": tensor(1, "B", 32), "c": tensor(1, "B", 32)},
    ["p", "hn", "cn"], by=TORCHSCRIPT,
    dynamic_axes={"audio": {0: "B"}, **{name: {1: "B"} for name in ("h", "c", "hn", "cn")}, "p": {0: "B"}})  # fmt: skip
add("nn_crnn_frozen", Recogniser, {"x": tensor(4, 1, 32, 100)}, ["y"], [{}])
add("nn_unet_frozen", UNet, {"x": tensor(2, 3, 64, 64)}, ["mask"], [{}])
add("nn_transformer_frozen", Transformer, {"x": tokens(1, 24), "mask": mask(1, 24)}, ["y"], [{}])
if __name__ == "__main__":
    files.main("torch", ["torch", "onnxscript"])
