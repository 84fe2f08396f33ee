"""Networks of transformers, made from configurations: encoders, decoders with past keys and values, speech, pictures."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import files
import torch
import transformers as hf
from files import mask, ones, sizes, tensor, tokens
from torch import nn
from torch_files import DYNAMO, TORCHSCRIPT, Picked, add

PACKAGES = ["transformers"]
LENGTHS = sizes("B T", (1, 12), (3, 12), (1, 40), (2, 40))
TOKENS, MASK = tokens("B", "T"), mask("B", "T")
KINDS = tensor("B", "T", dtype="int64", draw="integers", low=0, high=2)
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
DEBERTA = {
    "relative_attention": True, "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
    "layer_norm_eps": 1e-7, "pooler_hidden_size": 64,
}  # fmt: skip
STATES, BOTH, SCORES = ["last_hidden_state"], ["last_hidden_state", "pooler_output"], ["logits"]
DISTIL = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 1000}
MODERN = {"global_attn_every_n_layers": 2, "local_attention": 16, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
ENCODERS = {  # name -> class, configuration, outputs, whether tokens have kinds, options
    "bert": ("BertModel", "BertConfig", BOTH, True, SMALL),
    "bert_classifier": ("BertForSequenceClassification", "BertConfig", SCORES, True, SMALL),
    "bert_tagger": ("BertForTokenClassification", "BertConfig", SCORES, True, SMALL),
    "bert_masked": ("BertForMaskedLM", "BertConfig", SCORES, False, SMALL),
    "bert_answers": ("BertForQuestionAnswering", "BertConfig", ["start_logits", "end_logits"], True, SMALL),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig", SCORES, False, DISTIL),
    "roberta": ("RobertaModel", "RobertaConfig", BOTH, False, {**SMALL, **ROBERTA}),
    "xlmr": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", SCORES, False, {**SMALL, **ROBERTA}),
    "deberta_v3": ("DebertaV2ForSequenceClassification", "DebertaV2Config", SCORES, False, {**SMALL, **DEBERTA}),
    "deberta": ("DebertaModel", "DebertaConfig", STATES, False,
                {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
                 "max_relative_positions": 64}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", STATES, False, {**SMALL, **MODERN}),
    "electra": ("ElectraForSequenceClassification", "ElectraConfig", SCORES, True, {**SMALL, "embedding_size": 32}),
    "albert": ("AlbertModel", "AlbertConfig", BOTH, True, {**SMALL, "embedding_size": 32}),
    "mpnet": ("MPNetModel", "MPNetConfig", BOTH, False, SMALL),
    "nomic": ("NomicBertModel", "NomicBertConfig", STATES, False, SMALL),
    "t5_encoder": ("T5EncoderModel", "T5Config", STATES, False,
                   {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 1000}),
    "clip_text": ("CLIPTextModelWithProjection", "CLIPTextConfig", ["text_embeds", "last_hidden_state"], False,
                  {**SMALL, "projection_dim": 32, "eos_token_id": 2, "bos_token_id": 0}),
}  # fmt: skip


def of(name, config, options):
    return lambda: getattr(hf, name)(getattr(hf, config)(**options))


def add_encoder(name, make, outputs, kinds, by=DYNAMO, **more):
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, **({"token_type_ids": KINDS} if kinds else {})}
    start = "hf" if by == DYNAMO else "ts"
    add(f"{start}_{name}", lambda: Picked(make(), outputs, tuple(inputs)), inputs, outputs, LENGTHS, by=by,
        packages=PACKAGES, **more)  # fmt: skip


for name, (kind, config, outputs, kinds, options) in ENCODERS.items():
    add_encoder(name, of(kind, config, options), outputs, kinds)
for name in ("bert", "bert_classifier", "distilbert", "roberta", "deberta_v3", "albert", "t5_encoder", "modernbert"):
    kind, config, outputs, kinds, options = ENCODERS[name]
    lengths = {output: {0: "B", 1: "T"} for output in outputs if output == "last_hidden_state"}
    inputs = ["input_ids", "attention_mask", *["token_type_ids"] * kinds]
    axes = {"dynamic_axes": {**{each: {0: "B", 1: "T"} for each in inputs}, **lengths}}
    add_encoder(name, of(kind, config, options), outputs, kinds, by=TORCHSCRIPT, **axes)


class Sentence(nn.Module):
    """Mean of the words' embeddings, of length 1, as sentence-transformers has it."""

    def __init__(self):
        super().__init__()
        self.module = of("BertModel", "BertConfig", SMALL)()

    def forward(self, input_ids, attention_mask, token_type_ids):
        h = self.module(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        known = attention_mask.unsqueeze(-1).expand(h.size()).float()
        mean = (h * known).sum(1) / known.sum(1).clamp(min=1e-9)
        return h, nn.functional.normalize(mean, p=2, dim=1)


for start, by in (("hf", DYNAMO), ("ts", TORCHSCRIPT)):
    add(f"{start}_sentence", Sentence, {"input_ids": TOKENS, "attention_mask": MASK, "token_type_ids": KINDS},
        ["token_embeddings", "sentence_embedding"], LENGTHS, by=by, packages=PACKAGES)  # fmt: skip


class LayoutReader(nn.Module):
    """Words with their places on a page."""

    def __init__(self):
        super().__init__()
        self.module = of("LayoutLMForTokenClassification", "LayoutLMConfig", SMALL)()

    def forward(self, input_ids, attention_mask, bbox):
        return self.module(input_ids=input_ids, attention_mask=attention_mask, bbox=bbox).logits


add("hf_layoutlm", LayoutReader, {"input_ids": TOKENS, "attention_mask": MASK,
    "bbox": tensor("B", "T", 4, dtype="int64", draw="ones")}, ["logits"], LENGTHS, packages=PACKAGES)  # fmt: skip


class Decoder(nn.Module):
    """A language model's step: new words, and the keys and values of all before."""

    def __init__(self, module, layers):
        super().__init__()
        self.module, self.layers = module, layers

    def forward(self, input_ids, attention_mask, *past):
        pairs = list(zip(past[::2], past[1::2], strict=True))
        answer = self.module(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=hf.DynamicCache(pairs), use_cache=True
        )
        return (
            answer.logits,
            *[each for layer in answer.past_key_values.layers for each in (layer.keys, layer.values)],
        )


LANGUAGE = {**SMALL, "num_key_value_heads": 2}
DECODERS = {  # name -> class, configuration, heads of keys, options
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", 4, {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", 2, LANGUAGE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", 2, {**LANGUAGE, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", 2, {**LANGUAGE, "head_dim": 16, "sliding_window": 4096}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", 2, {**LANGUAGE, "pad_token_id": 0}),
    "opt": ("OPTForCausalLM", "OPTConfig", 4,
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 1000,
             "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", 4, SMALL),
}  # fmt: skip
STEPS = sizes("B T P A", (1, 1, 5, 6), (3, 1, 5, 6), (1, 4, 7, 11), (1, 1, 12, 13))


def add_decoder(name, make, heads, layers=2, width=16, by=DYNAMO):
    past = {f"past_key_values.{n}.{k}": tensor("B", heads, "P", width) for n in range(layers) for k in ("key", "value")}
    inputs = {"input_ids": tokens("B", "T"), "attention_mask": ones("B", "A"), **past}
    outputs = ["logits", *[each.replace("past_key_values", "present") for each in past]]
    more = {}
    if by == DYNAMO:
        each = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
        two = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        more["dynamic_shapes"] = (dict(two), dict(two), tuple(dict(each) for _ in past))
    else:
        more["dynamic_axes"] = {
            "input_ids": {0: "B", 1: "T"}, "attention_mask": {0: "B", 1: "A"}, "logits": {0: "B", 1: "T"},
            **{key: {0: "B", 2: "P"} for key in past}, **{key: {0: "B", 2: "A"} for key in outputs[1:]},
        }  # fmt: skip
    add(f"{'hf' if by == DYNAMO else 'ts'}_{name}_past", lambda: Decoder(make(), layers), inputs, outputs, STEPS, by=by,
        example_sizes={"T": 3, "P": 5, "A": 8}, packages=PACKAGES, **more)  # fmt: skip


for name, (kind, config, heads, options) in DECODERS.items():
    add_decoder(name, of(kind, config, options), heads)
for name in ("gpt2", "llama"):
    kind, config, heads, options = DECODERS[name]
    add_decoder(name, of(kind, config, options), heads, by=TORCHSCRIPT)
    add_encoder(f"{name}_whole", of(kind, config, {**options, "use_cache": False}), SCORES, False)

T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 1000}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000}  # fmt: skip
WHISPER = {**BART, "max_source_positions": 100, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


class SecondHalf(nn.Module):
    """The decoder of a network of two halves, without keys of earlier words."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, input_ids, encoder_hidden_states, encoder_attention_mask):
        states = hf.modeling_outputs.BaseModelOutput(last_hidden_state=encoder_hidden_states)
        return self.module(
            decoder_input_ids=input_ids, encoder_outputs=states, attention_mask=encoder_attention_mask, use_cache=False
        ).logits


class SecondHalfStep(nn.Module):
    """The decoder's step: keys and values of earlier words, and those of the source, which stay as they are."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, input_ids, encoder_attention_mask, *past):
        own = [(past[n], past[n + 1]) for n in range(0, len(past), 4)]
        cross = [(past[n + 2], past[n + 3]) for n in range(0, len(past), 4)]
        cache = hf.EncoderDecoderCache(hf.DynamicCache(own), hf.DynamicCache(cross))
        states = hf.modeling_outputs.BaseModelOutput(
            last_hidden_state=torch.zeros(input_ids.shape[0], encoder_attention_mask.shape[1], 64)
        )
        answer = self.module(
            decoder_input_ids=input_ids, encoder_outputs=states, attention_mask=encoder_attention_mask,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        kept = answer.past_key_values.self_attention_cache.layers
        return (answer.logits, *[each for layer in kept for each in (layer.keys, layer.values)])


HALVES = {
    "t5": of("T5ForConditionalGeneration", "T5Config", T5),
    "bart": of("BartForConditionalGeneration", "BartConfig", BART),
}
for name, make in HALVES.items():
    inputs = {"input_ids": tokens("B", "T"), "encoder_hidden_states": tensor("B", "S", 64),
              "encoder_attention_mask": mask("B", "S")}  # fmt: skip
    rows = sizes("B T S", (1, 1, 9), (3, 1, 9), (1, 6, 9), (2, 7, 20))
    add(f"hf_{name}_decoder", lambda make=make: SecondHalf(make()), inputs, ["logits"], rows, packages=PACKAGES)
    past = {
        f"past_key_values.{n}.{side}.{k}": tensor("B", 4, "P" if side == "decoder" else "S", 16)
        for n in range(2) for side in ("decoder", "encoder") for k in ("key", "value")
    }  # fmt: skip
    inputs = {"input_ids": tokens("B", 1), "encoder_attention_mask": mask("B", "S"), **past}
    outputs = ["logits", *[key.replace("past_key_values", "present") for key in past if "decoder" in key]]
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, {0: dynamic, 1: dynamic}, tuple({0: dynamic, 2: dynamic} for _ in past))
    rows = sizes("B P S", (1, 1, 9), (3, 1, 9), (1, 6, 9), (2, 7, 20))
    add(f"hf_{name}_decoder_past", lambda make=make: SecondHalfStep(make()), inputs, outputs, rows,
        example_sizes={"P": 5, "S": 7}, dynamic_shapes=shapes, packages=PACKAGES)  # fmt: skip


class Ears(nn.Module):
    """The first half of a network for speech."""

    def __init__(self):
        super().__init__()
        self.module = of("WhisperModel", "WhisperConfig", WHISPER)().get_encoder()

    def forward(self, input_features):
        return self.module(input_features).last_hidden_state


class Mouth(nn.Module):
    """The second half."""

    def __init__(self):
        super().__init__()
        self.module = of("WhisperForConditionalGeneration", "WhisperConfig", WHISPER)()

    def forward(self, input_ids, encoder_hidden_states):
        states = hf.modeling_outputs.BaseModelOutput(last_hidden_state=encoder_hidden_states)
        return self.module(decoder_input_ids=input_ids, encoder_outputs=states, use_cache=False).logits


for start, by in (("hf", DYNAMO), ("ts", TORCHSCRIPT)):
    add(f"{start}_whisper_encoder", Ears, {"input_features": tensor("B", 80, 200)}, STATES, by=by, packages=PACKAGES)
add("hf_whisper_decoder", Mouth, {"input_ids": tokens("B", "T"), "encoder_hidden_states": tensor("B", 100, 64)},
    SCORES, sizes("B T", (1, 1), (3, 1), (1, 6), (2, 7)), packages=PACKAGES)  # fmt: skip

SPEECH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
          "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
SOUNDS = sizes("B T", (1, 4000), (3, 4000), (1, 6400))
for start, by in (("hf", DYNAMO), ("ts", TORCHSCRIPT)):
    for name, kind, config in (
        ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config"),
        ("hubert", "HubertModel", "HubertConfig"),
    ):
        outputs = SCORES if name == "wav2vec2" else STATES
        make = of(kind, config, {**SPEECH, "vocab_size": 32})
        add(f"{start}_{name}", lambda make=make, outputs=outputs: Picked(make(), outputs, ("input_values",)),
            {"input_values": tensor("B", "T")}, outputs, SOUNDS, by=by, example_sizes={"T": 4000},
            packages=PACKAGES)  # fmt: skip

EYES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
SWIN = {"embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "image_size": 112, "window_size": 7}
PICTURES = sizes("B H W", (1, 64, 96), (3, 64, 96), (1, 96, 128))
SEGFORMER = {"num_labels": 5, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32}
RESNET = {"depths": [1, 1, 1, 1], "layer_type": "basic", "hidden_sizes": [16, 32, 48, 64], "embedding_size": 16}
SEEING = {  # name -> module, outputs, size of the picture (0: any)
    "vit": (of("ViTForImageClassification", "ViTConfig", {**EYES, "image_size": 112}), SCORES, 112),
    "clip_vision": (of("CLIPVisionModelWithProjection", "CLIPVisionConfig",
                       {**EYES, "projection_dim": 32, "image_size": 112, "patch_size": 16}),
                    ["image_embeds", "last_hidden_state"], 112),
    "siglip": (of("SiglipVisionModel", "SiglipVisionConfig", {**EYES, "image_size": 112}), BOTH, 112),
    "dinov2": (of("Dinov2Model", "Dinov2Config", {**EYES, "image_size": 98}), BOTH, 0),
    "segformer": (of("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER), SCORES, 0),
    "swin_hf": (of("SwinModel", "SwinConfig", SWIN), BOTH, 112),
    "resnet_hf": (of("ResNetForImageClassification", "ResNetConfig", RESNET), SCORES, 0),
    "convnext_hf": (of("ConvNextForImageClassification", "ConvNextConfig",
                       {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}), SCORES, 0),
    "mobilevit_hf": (of("MobileViTForImageClassification", "MobileViTConfig",
                        {"hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]}), SCORES, 128),
    "depth_anything": (of("DepthAnythingForDepthEstimation", "DepthAnythingConfig",
                          {"backbone_config": hf.Dinov2Config(**EYES, image_size=98, out_features=["stage1", "stage2"] * 1,
                                                              reshape_hidden_states=False, apply_layernorm=True),
                           "reassemble_hidden_size": 48, "neck_hidden_sizes": [8, 16], "reassemble_factors": [2, 1],
                           "fusion_hidden_size": 16, "head_hidden_size": 8}), ["predicted_depth"], 98),
}  # fmt: skip
for name, (make, outputs, side) in SEEING.items():
    shape = ("B", 3, side, side) if side else ("B", 3, "H", "W")
    rows = sizes("B H W", (1, 98, 98), (3, 98, 98), (1, 98, 126)) if name == "dinov2" else PICTURES
    shown = {"H": 98, "W": 126} if name == "dinov2" else {}
    add(f"hf_{name}", lambda make=make, outputs=outputs: Picked(make(), outputs, ("pixel_values",)),
        {"pixel_values": tensor(*shape)}, outputs, None if side else rows, example_sizes=shown, packages=PACKAGES)  # fmt: skip
    if name in ("vit", "swin_hf", "segformer", "clip_vision"):
        add(f"ts_{name}", lambda make=make, outputs=outputs: Picked(make(), outputs, ("pixel_values",)),
            {"pixel_values": tensor(*shape)}, outputs, None if side else rows, by=TORCHSCRIPT, packages=PACKAGES)  # fmt: skip

BOXES = ["logits", "pred_boxes"]
DETR = hf.DetrConfig(
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
    backbone_config=hf.ResNetConfig(**RESNET, out_features=["stage4"]), encoder_layers=1, decoder_layers=1,
    num_queries=20, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
)  # fmt: skip
RT_DETR = hf.RTDetrConfig(
    backbone_config=hf.RTDetrResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"]),
    encoder_in_channels=[32, 48, 64], decoder_layers=1, num_queries=30, anchor_image_size=None, d_model=64,
    encoder_hidden_dim=64, encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_in_channels=[64, 64, 64],
    decoder_attention_heads=4, encoder_attention_heads=4,
)  # fmt: skip
add("hf_detr", lambda: Picked(hf.DetrForObjectDetection(DETR), BOXES, ("pixel_values",)),
    {"pixel_values": tensor("B", 3, "H", "W")}, BOXES, PICTURES, example_sizes={"H": 64, "W": 96}, packages=PACKAGES)  # fmt: skip
add("hf_rt_detr", lambda: Picked(hf.RTDetrForObjectDetection(RT_DETR), BOXES, ("pixel_values",)),
    {"pixel_values": tensor("B", 3, 128, 128)}, BOXES, packages=PACKAGES)  # fmt: skip
if __name__ == "__main__":
    files.main("torch", ["torch", "onnxscript"])
