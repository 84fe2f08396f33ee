"""The numbers that VELTAIR's text gives (ASPLOS 2022), by figure. Curves and bars without a number in the text are not
here.

Its machine: Threadripper 3990X, 64 cores at 2.9 GHz, AVX2, 256 MB of shared cache; targets as in its Table 2.
"""

CONFLICT_RATE = {("planaria", 300): 0.238}  # Fig. 5a, section 3.2: layer-wise, ResNet-50, by arrivals per second
LATENCY_MS = {("planaria", 300): 21.4}  # Fig. 3b, section 3.2; 18.54 without what growing costs

# Fig. 12, section 5.2: highest rate with 95 % of the queries in time, over that of Planaria's scheduling.
RATE_OVER_PLANARIA = {
    "light": {"veltair": 1.71},
    "medium": {"veltair": 1.62},
    "heavy": {"veltair": 1.44},
    "mix": {"veltair": 1.68, "veltair_ac": 1.50},
}
# Fig. 13, section 5.3: mean latency at that rate over the isolated one, mean of the models.
LATENCY_OVER_ISOLATED = {"veltair_as": 1.6, "veltair_ac": 1.17, "veltair": 1.1}
# Fig. 14a, section 5.4: cores used beyond those of the layer-wise scheduling, at 75 % load (veltair: less than).
CORE_USE_GAP = {"veltair_as": 0.10, "model_fcfs": 0.47}
