"""A small encoder of tokens, one that scores pairs, and their tokenizer; what they are to answer, by onnxruntime."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.helpers.onnx_models import save_model
from tests.helpers.onnx_text import save, weights_of
from tests.helpers.ways import Array

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "cat", "dog", "sits", "runs", "##s"]
SIZE = 16
MAX_TOKENS = 48
INPUTS = "int64[B,T] input_ids, int64[B,T] attention_mask, int64[B,T] token_type_ids"
ENCODER = """
    words = Gather(table, input_ids) kinds = Gather(types, token_type_ids) x = Add(words, kinds)
    turned = Transpose<perm=[0, 2, 1]>(x) products = MatMul(x, turned)
    known = Cast<to=1>(attention_mask) absent = Sub(one, known) lowered = Mul(absent, lowest)
    bias = Unsqueeze(lowered, axis) masked = Add(products, bias) shares = Softmax<axis=-1>(masked)
    mixed = MatMul(shares, x) sum = Add(mixed, x) states = LayerNormalization(sum, scale, shift)
"""


class TextModel:
    """A model of the repository, with its own reference. `scores`: whether it scores pairs."""

    def __init__(self, repository: Path, name: str, scores: bool, config: str = "") -> None:
        self.name, self.scores = name, scores
        weights = weights_of(len(name), {"table": (len(VOCABULARY), SIZE), "types": (2, SIZE), "head": (SIZE, 1)}, 0.7)
        weights |= {"one": np.float32(1), "lowest": np.float32(-1e4), "axis": np.array([1])}
        weights |= {"scale": np.ones(SIZE, np.float32), "shift": np.zeros(SIZE, np.float32)}
        if scores:
            output = "(float[B,1] logits)"
            end = "first = Gather<axis=1>(states, zero) logits = MatMul(first, head)"
            weights["zero"] = np.array(0)
        else:
            output, end = f"(float[B,T,{SIZE}] last_hidden_state)", "last_hidden_state = Identity(states)"
            del weights["head"]
        self._path = save(repository, name, f"({INPUTS}) => {output} {{ {ENCODER} {end} }}", config, **weights)
        self.folder = repository / name
        tokenizer().save(str(self.folder / "tokenizer.json"))
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": MAX_TOKENS}))

    def with_pooling(self, mode: str) -> None:
        """Write what sentence-transformers would beside it."""
        folder = self._path.parents[1]
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
        names = ["Transformer", "Pooling"]
        modules = [{"idx": index, "type": f"sentence_transformers.models.{name}"} for index, name in enumerate(names)]
        (folder / "modules.json").write_text(json.dumps(modules))

    @cached_property
    def _session(self) -> Any:
        return onnxruntime.InferenceSession(str(self._path), providers=["CPUExecutionProvider"])

    def states(self, text: str | tuple[str, str] | list[int]) -> Array:
        """The output for one row that is not padded."""
        if isinstance(text, list):
            ids, types = text, [0] * len(text)
        else:
            encoded = tokenizer().encode(*([text] if isinstance(text, str) else text))
            ids, types = encoded.ids, encoded.type_ids
        rows = [ids, [1] * len(ids), types]
        names = ["input_ids", "attention_mask", "token_type_ids"]
        feeds = {name: np.array([row], np.int64) for name, row in zip(names, rows, strict=True)}
        output: Array = self._session.run(None, feeds)[0][0]
        return output

    def vector(self, text: str | list[int]) -> Array:
        """The mean of its states, of length 1."""
        mean = self.states(text).mean(axis=0)
        vector: Array = mean / np.linalg.norm(mean)
        return vector

    def score(self, query: str, document: str) -> float:
        """The relevance of a document."""
        return float(1 / (1 + np.exp(-self.states((query, document))[0])))


def save_reader(repository: Path, name: str, config: str) -> Array:
    """Write a model that makes the tokens of a text itself, by onnxruntime-extensions, and the mean of their rows.

    Returns the rows, by token.
    """
    table: Array = weights_of(0, {"table": (len(VOCABULARY), SIZE)})["table"]
    nodes = [
        helper.make_node(
            "BertTokenizer",
            ["text"],
            ["ids", "types", "mask"],
            domain="ai.onnx.contrib",
            vocab_file="\n".join([*VOCABULARY, "[MASK]"]),
            do_lower_case=1,
        ),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["vector"], axes=[0], keepdims=1),
    ]
    inputs, outputs = {"text": (TensorProto.STRING, [1])}, {"vector": [1, SIZE]}
    save_model(
        repository / name / "1" / "model.onnx", nodes, inputs, outputs, {"table": table}, domains={"ai.onnx.contrib": 1}
    )
    (repository / name / "config.pbtxt").write_text(config)
    return table


def tokenizer() -> Tokenizer:
    """A tokenizer as BERT's, with a padding of its own that a server must not apply."""
    vocabulary = {token: place for place, token in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made
