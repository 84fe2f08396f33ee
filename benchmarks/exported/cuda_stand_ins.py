"""Stand-ins for the CUDA libraries that PyPI's torch is linked with, and that no export on a CPU calls.

    python -m benchmarks.exported.cuda_stand_ins SITE_PACKAGES

The libraries are 2 GB to fetch and 4 GB on disk. A stand-in defines the symbols that torch wants of one of them; each
of its functions ends the process. `nvidia-cuda-runtime` (2 MB) is real: torch calls it when it is imported.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

_REAL = ("libcudart.",)
_BY_NAME = {  # a symbol's first letters -> its library, where it has no version
    "cuFile": "libcufile.so.0",
    "cupti": "libcupti.so.13",
    "cusparseLt": "libcusparseLt.so.0",
    "nccl": "libnccl.so.2",
}


def make_stand_ins(site_packages: Path) -> list[Path]:
    """Write the stand-ins beside torch's libraries, where these look for them. Needs binutils and cc."""
    folder = site_packages / "torch" / "lib"
    files = sorted(folder.glob("lib*torch*.so")) + sorted(folder.glob("libc10*.so"))
    symbols = defaultdict[str, dict[str, set[str]]](lambda: defaultdict(set))  # by library and version
    for file in files:
        headers = _output("objdump", "-p", file)
        for library in re.findall(r"NEEDED +(\S+)", headers):
            if re.match(r"lib(cu|nv|nccl)", library) and not library.startswith(_REAL):
                symbols[library][""] |= set()
        versions = {
            version: library
            for library, block in re.findall(r"required from (\S+):\n((?: +0x.*\n)+)", headers)
            for version in re.findall(r"(\S+)\n", block)
        }
        for line in _output("nm", "-D", "--undefined-only", file).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            library = versions.get(version) or next(
                (lib for start, lib in _BY_NAME.items() if symbol.startswith(start)), ""
            )
            if library in symbols:
                symbols[library][version].add(symbol)
    return [_make(folder / library, versions) for library, versions in sorted(symbols.items())]


def _make(path: Path, versions: Mapping[str, set[str]]) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stand_in.c"), Path(scratch, "versions")
        functions = [f"void {symbol}(void) {{ abort(); }}" for symbol in sorted(set().union(*versions.values()))]
        source.write_text("\n".join(["void abort(void);", *functions, ""]))
        nodes = [f"{name} {{ global: {'; '.join(sorted(names))}; }};" for name, names in versions.items() if name]
        script.write_text("\n".join(nodes))
        options = [f"-Wl,-soname,{path.name}", *[f"-Wl,--version-script={script}"] * bool(nodes)]
        subprocess.run(["cc", "-shared", "-fPIC", "-w", *options, "-o", str(path), str(source)], check=True)
    return path


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for made in make_stand_ins(Path(sys.argv[1])):
        print(made)
