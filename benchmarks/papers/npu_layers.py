"""`python -m benchmarks.papers.npu_layers` writes `npu_layers.csv` beside it.

That is the matrix products of the models of Layerweaver+'s evaluation, from the zoo; weights are not drawn for it.
"""

import csv
from dataclasses import astuple, fields
from pathlib import Path

from gangway.zoo import build
from gangway.zoo.cost import MatrixProduct, matrix_products

MODELS = ("inception_v3", "mobilenetv2", "resnet50", "bert_base", "bert_large", "xlnet_base")
TABLE = Path(__file__).parent / "npu_layers.csv"


def main() -> None:
    """Write the table."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", *(field.name for field in fields(MatrixProduct))))
        for name in MODELS:
            rows = [astuple(product) for product in matrix_products(build(name).without_weights())]
            writer.writerows((name, *row[:-1], int(row[-1])) for row in rows)
            print(f"{name}: {len(rows)} products")


if __name__ == "__main__":
    main()
