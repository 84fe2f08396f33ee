"""A small profile as if it had been measured: one layer on two whole cores."""

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine

PROFILE = Profile(
    key="0" * 64,
    model_name="model",
    machine=ProfiledMachine("0123456789ab", "a CPU", 2, "avx2", 1.0, 1.0),
    cores=(1, 2),
    batches=(1,),
    layers=(LayerProfile("layer", (((10.0,), (10.0,)),), 1.0, 1.0, (), ()),),
    isolated_us=((10.0,), (10.0,)),
    together_us=((10.0,), (10.0,)),
    interference=(),
    interference_cores=0,
    runs=(9,),
    scatter=0.02,
    seconds=1.0,
)
