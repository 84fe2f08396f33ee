"""What onnxruntime's quantisers and optimisers, the float16 converters, onnxslim and onnxsim make of other files.

They lie in folders beside that of these files.
"""

import json
import sys
import tempfile
from pathlib import Path

import files
import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process

FOLDER = Path(sys.argv[1]).resolve().parent
ORT = ("onnxruntime",)


def source(name):
    return next(iter(FOLDER.glob(f"*/{name}.onnx")), FOLDER / "none" / name)


def derived(name, base, write, packages, tolerance=1e-2, only=None):
    """Add a file that `write(from, to)` makes of another one, whose description it has; `only`: these asks."""
    described = source(base).with_suffix(".json")
    if not described.exists():
        print(f"failed  {name}: there is no {base}", flush=True)
        return
    known = json.loads(described.read_text())
    asks = known["asks"] if only is None else only
    files.add(name, lambda path: write(source(base), path), known["inputs"], asks, tolerance, packages)


def dynamic(origin, path):
    model = onnx.load(origin)
    del model.graph.value_info[:]  # torch's says the shapes of weights before they are turned round, which it refuses
    quantization.quantize_dynamic(model, path, weight_type=quantization.QuantType.QInt8)


def dynamic_unsigned(origin, path):
    quantization.quantize_dynamic(origin, path, weight_type=quantization.QuantType.QUInt8, per_channel=True)


class Examples(quantization.CalibrationDataReader):
    """Some random requests, as a file's description says."""

    def __init__(self, description):
        random = np.random.default_rng(0)
        sizes = description["asks"][0]
        self._each = iter([
            {
                name: random.random([sizes.get(size, size) for size in each["shape"]], dtype=np.float32)
                for name, each in description["inputs"].items()
            }
            for _ in range(4)
        ])  # fmt: skip

    def get_next(self):
        return next(self._each, None)


def static(form, pre=True, **options):
    def write(origin, path):
        examples = Examples(json.loads(origin.with_suffix(".json").read_text()))
        with tempfile.TemporaryDirectory() as scratch:
            prepared = str(Path(scratch, "prepared.onnx"))
            if pre:
                quant_pre_process(str(origin), prepared, skip_symbolic_shape=True)
            quantization.quantize_static(
                prepared if pre else str(origin),
                str(path),
                examples,
                quant_format=getattr(quantization.QuantFormat, form),
                **options,
            )

    return write


def packed(bits=4, **options):
    def write(origin, path):
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        made = MatMulNBitsQuantizer(onnx.load(origin), block_size=32, is_symmetric=True, bits=bits, **options)
        made.process()
        made.model.save_model_to_file(str(path), False)

    return write


def half(**options):
    def write(origin, path):
        from onnxconverter_common import float16

        onnx.save(float16.convert_float_to_float16(onnx.load(origin), **options), path)

    return write


def half_of_onnxruntime(origin, path):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(origin), keep_io_types=True), path)


def optimised(kind="bert", heads=4, width=64):
    def write(origin, path):
        from onnxruntime.transformers.optimizer import optimize_model

        optimize_model(str(origin), model_type=kind, num_heads=heads, hidden_size=width).save_model_to_file(str(path))

    return write


def saved(level):
    def write(origin, path):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(str(origin), options, providers=["CPUExecutionProvider"])

    return write


def slim(origin, path):
    import onnxslim

    onnxslim.slim(str(origin), str(path))


def simplified(origin, path):
    import onnxsim

    made, agrees = onnxsim.simplify(str(origin))
    assert agrees
    onnx.save(made, path)


for base in ("hf_bert_classifier", "ts_bert", "nn_lstm", "hf_deberta_v3", "tv_vit", "hf_gpt2_past", "hf_t5_encoder"):
    derived(f"dynamic_{base}", base, dynamic, ORT, 5e-2)
for base in ("ts_bert_classifier", "nn_transformer"):
    derived(f"dynamic_unsigned_{base}", base, dynamic_unsigned, ORT, 5e-2)
for base in (
    *("tv_resnet18", "tv_mobilenet_v3_small", "ts_mobilenet_v3_small", "nn_unet", "tv_convnext", "timm_repvit_m0_9"),
):
    derived(f"qdq_{base}", base, static("QDQ"), ORT, 5e-2)
derived("qdq_yolo11", "yolo11", static("QDQ", pre=False), ORT, 5e-2)
derived("qdq_channels_tv_mobilenet_v2", "tv_mobilenet_v2", static("QDQ", per_channel=True), ORT, 5e-2)
derived("qdq_signed_ts_vit", "ts_vit", static("QDQ", activation_type=quantization.QuantType.QInt8), ORT, 5e-2)
derived("qoperator_tv_resnet18", "tv_resnet18", static("QOperator"), ORT, 5e-2)
for base in ("hf_llama_past", "hf_bert", "nn_rotary"):
    derived(f"four_bits_{base}", base, packed(), ORT)
derived("eight_bits_hf_bert", "hf_bert", packed(8), ORT)
CONVERTER = ("onnxconverter-common",)
for base in ("hf_bert", "tv_mobilenet_v3_small", "yolo11_dynamic", "nn_tcn"):
    derived(f"half_{base}", base, half(), CONVERTER, 2e-2)
derived("half_kept_hf_bert", "hf_bert", half(keep_io_types=True), CONVERTER, 2e-2)
derived("half_kept_ts_resnet18", "ts_resnet18", half(keep_io_types=True), CONVERTER, 2e-2)
derived("half_ort_hf_bert", "hf_bert", half_of_onnxruntime, ORT, 2e-2)
for base in ("hf_bert", "ts_bert", "ts_bert_classifier", "hf_roberta", "ts_distilbert"):
    derived(f"optimised_{base}", base, optimised(), ORT)
derived("optimised_hf_gpt2_past", "hf_gpt2_past", optimised("gpt2"), ORT)
derived("optimised_hf_vit", "hf_vit", optimised("vit", 3, 48), ORT)
for base in ("tv_mobilenet_v3_small", "hf_bert", "nn_gru", "ts_swin"):
    derived(f"saved_{base}", base, saved("ORT_ENABLE_EXTENDED"), ORT)
for base in ("hf_bert", "tv_swin", "yolo11_dynamic", "hf_deberta_v3", "tv_deeplab", "ts_crnn", "hf_t5_decoder_past"):
    derived(f"slim_{base}", base, slim, ("onnxslim",))
for base in ("hf_bert", "tv_swin", "tv_fasterrcnn", "tv_convnext", "ts_crnn", "ts_segformer"):
    derived(f"simplified_{base}", base, simplified, ("onnxsim",))
if __name__ == "__main__":
    files.main("onnxruntime", ["onnx"])
