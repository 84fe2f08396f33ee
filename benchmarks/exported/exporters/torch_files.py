"""How torch's two exporters are called, for all scripts of the environment `torch`."""

import warnings

import files
import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.backends.mha.set_fastpath_enabled(False)  # its operators have no ONNX
DYNAMO, TORCHSCRIPT = "torch (dynamo)", "torch (TorchScript)"
_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_EXAMPLE = {"B": 2, "T": 9, "S": 7, "H": 64, "W": 96}  # what models are exported with


def example(described, sizes):
    """Return the tensor with which a model is exported."""
    shape = [sizes.get(size, size) for size in described["shape"]]
    if described["draw"] == "integers":
        drawn = torch.randint(int(described["low"]), int(described["high"]), shape)
    elif described["draw"] in ("ones", "mask"):
        drawn = torch.ones(shape)
    else:
        drawn = torch.rand(shape) * (described["high"] - described["low"]) + described["low"]
    return drawn.to(_DTYPES[described["dtype"]])


def add(name, make, inputs, outputs, asks=None, by=DYNAMO, example_sizes=None, fixed=(), **more):
    """Add a module's file; `make()` returns it. Sizes with a name in `inputs` are dynamic, but those of `fixed`.

    Names of inputs are those of the arguments of `forward`, in their order.
    """
    used = {**_EXAMPLE, **(example_sizes or {})}
    packages = more.pop("packages", ())
    tolerance = more.pop("tolerance", 1e-3)

    def write(path):
        torch.manual_seed(0)
        module = make().eval()
        values = {key: example(each, used) for key, each in inputs.items()}
        axes = {
            key: {axis: size for axis, size in enumerate(each["shape"]) if isinstance(size, str) and size not in fixed}
            for key, each in inputs.items()
        }
        with torch.no_grad():
            if by == TORCHSCRIPT:
                kwargs = {"dynamo": False, "dynamic_axes": {key: dict(each) for key, each in axes.items()}, **more}
                kwargs["dynamic_axes"].update({output: {0: "B"} for output in outputs if not fixed})
            else:
                dims = tuple(dict.fromkeys(each, torch.export.Dim.DYNAMIC) for each in axes.values())
                dims = (dims,) if isinstance(module, Picked) else dims  # its `forward` takes any number
                kwargs = {"dynamic_shapes": dims, "external_data": False, "verbose": False, **more}
            torch.onnx.export(
                module, tuple(values.values()), str(path), input_names=list(inputs), output_names=outputs, **kwargs
            )

    files.add(name, write, inputs, asks, tolerance, packages)


class Picked(nn.Module):
    """A module of which some outputs count: `names` of a dictionary or of attributes."""

    def __init__(self, module, names, arguments=()):
        super().__init__()
        self.module, self.names, self.arguments = module, names, arguments

    def forward(self, *values):
        answer = (
            self.module(**dict(zip(self.arguments, values, strict=True))) if self.arguments else self.module(*values)
        )
        picked = tuple(answer[name] if isinstance(answer, dict) else getattr(answer, name) for name in self.names)
        return picked if len(picked) > 1 else picked[0]
