"""Writes `simulator/npu_layers.csv`: the matrix products of the models of Layerweaver+'s evaluation, from the zoo.

`python -m benchmarks.npu_layers [REPOSITORY]`. REPOSITORY has the models as `gangway zoo` writes them; those that it
lacks are built (a few GB of memory for bert_large).
"""

import csv
import sys
from dataclasses import astuple, fields
from pathlib import Path

import onnx
from gangway.zoo import build
from gangway.zoo.products import Product, products

MODELS = ("inception_v3", "mobilenetv2", "resnet50", "bert_base", "bert_large", "xlnet_base")
TABLE = Path(__file__).parent.parent / "simulator" / "npu_layers.csv"


def main() -> None:
    """Write the table."""
    repository = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", *(field.name for field in fields(Product))))
        for name in MODELS:
            rows = [astuple(product) for product in products(_model(name, repository))]
            writer.writerows((name, *row[:-1], int(row[-1])) for row in rows)
            print(f"{name}: {len(rows)} products")


def _model(name: str, repository: Path | None) -> onnx.ModelProto:
    path = repository / name / "1" / "model.onnx" if repository else None
    return onnx.load(path) if path and path.exists() else build(name)


if __name__ == "__main__":
    main()
