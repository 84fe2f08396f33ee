"""Builds C programmes that exercise the native part, under a sanitizer."""

import subprocess

SANITIZERS = ("thread", "address,undefined")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-sanitize-recover=all")


def build(sources, binary, sanitizer, *more_flags):
    """Compile and link `sources` to `binary`, and return that."""
    command = ["gcc", *FLAGS, f"-fsanitize={sanitizer}", *more_flags, *map(str, sources), "-pthread", "-o", str(binary)]
    subprocess.run(command, check=True)
    return binary
