"""The navigation of the site, made of the folders: a new page needs no entry here. A hook of mkdocs (`mkdocs.yml`)."""

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SECTIONS = {
    "Tutorials": "tutorials",
    "How-to": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Measurements": "measurements",
}
# Pages that come first in their section, in this order; the others follow by name.
FIRST = {
    "tutorials": ("first-model", "image-to-label", "embeddings", "three-models", "from-triton"),
    "how-to": (
        "install",
        "container",
        "systemd",
        "from-pytorch",
        "from-scikit-learn",
        "settings",
        "latency-target",
        "batches",
        "shapes",
        "precision",
        "python-models",
        "ensembles",
        "sequences",
        "shared-memory",
        "remote-repositories",
        "tls",
        "capacity",
        "monitoring",
        "watch",
        "traces",
        "troubleshooting",
        "front-ends",
        "scale-check",
        "many-machines",
        "kubernetes",
    ),
    "reference": (
        "commands",
        "flags",
        "config",
        "repository",
        "http",
        "streaming",
        "clients",
        "perf",
        "metrics",
        "logging",
        "limits",
        "operators",
        "triton",
        "differences",
        "pb-utils",
    ),
    "explanation": (
        "how-it-works",
        "targets",
        "scheduling",
        "batching",
        "model-life",
        "front-end",
        "processes-and-memory",
        "compiler",
        "artifact",
        "profiles-and-versions",
        "simulator",
        "papers",
        "glossary",
    ),
    "measurements": (
        "overview",
        "serving",
        "front-end",
        "batching",
        "kernels",
        "precision",
        "exported",
        "simulator",
        "many-machines",
        "faults",
        "packages",
        "papers",
        "notes",
    ),
}


def pages(folder: str) -> list[str]:
    """Return the pages of a section, as paths within `docs`."""
    names = sorted(path.stem for path in (DOCS / folder).glob("*.md"))
    first = [name for name in FIRST[folder] if name in names]
    return [f"{folder}/{name}.md" for name in (*first, *(name for name in names if name not in first))]


def on_config(config: Any) -> Any:
    """Give the site its navigation."""
    config["nav"] = [
        {"Home": "index.md"},
        *({title: pages(folder)} for title, folder in SECTIONS.items() if pages(folder)),
    ]
    return config
