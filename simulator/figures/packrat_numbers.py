"""The numbers that Packrat's text gives (2024), by figure and table. Curves and bars without a number are not here.

Its machine: 16 cores (one socket) of a Xeon Gold 6142 at 2.6 GHz, AVX-512; PyTorch 1.12.1, graph mode, TorchServe.
"""

MODELS = ("resnet50", "inception_v3", "gpt2", "bert_base")  # under the names of `gangway zoo`
BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)

# Fig. 4, section 5.1.1: latency of the fat instance over that of the split, mean over the batches, inference alone.
MEAN_SPEEDUP = {"resnet50": 1.53, "inception_v3": 1.52, "gpt2": 1.18, "bert_base": 1.13}
# Fig. 5, section 5.2.1: the same through TorchServe; least and largest of the four models.
SERVED_MEAN = (1.43, 1.83)
SERVED_MOST = (1.72, 2.09)

# Fig. 1, section 2.1: ResNet-50, by batch: (from, to) threads -> latency over latency.
THREADS_GAIN = {(4, 2, 4): 1.85, (4, 8, 16): 1.4, (32, 2, 4): 1.9, (32, 8, 16): 1.4}

# Appendix A: ResNet-50, 256 rows on 16 cores, milliseconds: fat, one thin gang <1, 1, 16> alone, 16 of them.
RESNET50_256 = {"fat": 2664.0, "thin alone": 1224.0, "thin together": 1600.0}

# Table 2: BERT, by cores and batch.
CONFIGURATIONS = {
    16: {
        8: "<2, 8, 4>", 16: "<4, 4, 4>", 32: "<4, 4, 8>", 64: "<4, 4, 16>", 128: "<4, 4, 32>", 256: "<8, 2, 32>",
        512: "<8, 2, 64>", 1024: "<8, 2, 128>",
    },
    14: {
        8: "<2, 7, 4>", 16: "<1, 6, 8>, <2, 4, 4>", 32: "<1, 6, 16>, <2, 4, 8>", 64: "<1, 6, 32>, <2, 4, 16>",
        128: "<2, 7, 64>", 256: "<2, 3, 64>, <4, 2, 32>", 512: "<2, 3, 128>, <4, 2, 64>",
        1024: "<2, 3, 256>, <4, 2, 128>",
    },
}  # fmt: skip

# Fig. 6, section 5.2.2: Inception v3, 16 cores, from batches of 8 to batches of 64.
CHANGE_S = 5.0  # of configuration
CHANGE_SLOWDOWN = (2.0, 3.0)  # of latency meanwhile
CHANGE_GAIN = 1.54  # latency before over after
