import re, subprocess
from pathlib import Path
HUNK = re.compile(r"<<<<<<< [^\n]*\n(.*?)=======\n(.*?)>>>>>>> [^\n]*\n", re.S)
def show(path): return subprocess.run(["git","show",f"origin/main:{path}"],check=True,capture_output=True,text=True).stdout
def resolve(path, picks):
    p = Path(path); t = p.read_text(); it = iter(picks)
    def pick(m):
        c = next(it)
        return c(m[1], m[2]) if callable(c) else c
    t = HUNK.sub(pick, t); assert next(it, None) is None, path
    p.write_text(t)
ours = lambda a,b: a
mine = lambda a,b: b
both = lambda a,b: a+b
def table(a, b):
    a = "".join(l for l in a.splitlines(True) if "ModelConfig.sequence_batching" not in l)
    b = "".join(l for l in b.splitlines(True) if "ModelConfig.ensemble_scheduling" not in l)
    return b + a
resolve("docs/config.md", [table])
resolve("server/config_table.py", [table])
# data plane: theirs, with the layouts moved and held memory
t = show("server/data_plane.py")
a, b = t.index("@dataclass(frozen=True)\nclass TensorLayout:"), t.index("class Request:\n")
moved = t[a:b].rstrip() + "\n"
t = t[:a] + t[b:]
for x, y in (
 ("from functools import cached_property\n", ""),
 ("from gangway.artifact.format import ALIGNMENT_BYTES, TensorSpec\nfrom gangway.executor.frames import Frame\n", ""),
 ("from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere\n", """from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere
from gangway.server.layouts import FrameLayout as FrameLayout  # noqa: PLC0414 - others take these from here
from gangway.server.layouts import HeldBlock, HeldLayout
from gangway.server.layouts import Layout as Layout  # noqa: PLC0414
from gangway.server.layouts import Placement as Placement  # noqa: PLC0414
from gangway.server.layouts import TensorLayout as TensorLayout  # noqa: PLC0414
"""),
 ("        self.elsewhere.let_go()\n        return True\n", "        self.elsewhere.let_go()\n        if isinstance(self.layout, HeldLayout):\n            self._plane.unuse(self.layout.blocks)\n        return True\n"),
 ("            return Request(self, layout, rows, slot, block, placement, elsewhere)\n", """            if isinstance(layout, HeldLayout):
                placement = layout.placed(placement, block)
                for held in layout.blocks:
                    held.uses += 1
            return Request(self, layout, rows, slot, block, placement, elsewhere)
"""),
 ("    def send(self, message: bytes) -> bool:\n", '''    def hold(self, size_bytes: int) -> HeldBlock:
        """Return memory that outlives requests; `drop` it. Raises PoolExhaustedError, at once."""
        with self.lock:
            return HeldBlock(self.allocate(size_bytes), size_bytes)

    def drop(self, block: HeldBlock) -> None:
        """Give held memory back, as soon as no request uses it any more: ranks may still write into it until then."""
        with self.lock:
            block.dropped = True
            self._free_unused(block)

    def unuse(self, blocks: Sequence[HeldBlock]) -> None:
        """A request that used these blocks has let go of them. The caller holds the lock."""
        for block in blocks:
            block.uses -= 1
            self._free_unused(block)

    def send(self, message: bytes) -> bool:
'''),
 ("    def _release_aside(self) -> None:\n", "    def _free_unused(self, block: HeldBlock) -> None:\n        if block.dropped and not block.uses:\n            self.heap.free(block.offset)\n\n    def _release_aside(self) -> None:\n"),
 ('"""What is taken at this moment."""', '"""What is taken at this moment. `heap_bytes` include held memory."""'),
):
    assert x in t, x
    t = t.replace(x, y, 1)
Path("server/data_plane.py").write_text(t)
held = '''@dataclass(eq=False)
class HeldBlock:
    """Memory that outlives a request. It is given back when its owner has dropped it and no request uses it."""

    offset: int
    size_bytes: int
    uses: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class HeldLayout:
    """A compiled model's layout, but for tensors that lie in held blocks: offset in the segment and size, by index.

    `base` has no bytes for these.
    """

    base: TensorLayout
    inputs: Mapping[int, tuple[int, int]]
    outputs: Mapping[int, tuple[int, int]]
    blocks: tuple[HeldBlock, ...]

    @property
    def model_id(self) -> int:
        """The model's number."""
        return self.base.model_id

    @property
    def frame_bytes(self) -> tuple[int, int]:
        """No frames."""
        return 0, 0

    def place(self, rows: int, elsewhere: Elsewhere = NOWHERE) -> "Placement":
        """Return where all other tensors lie within one block."""
        return self.base.place(rows, elsewhere)

    def placed(self, others: "Placement", block: int) -> "Placement":
        """Return where all tensors lie, seen from the block where the others are."""
        inputs, outputs = list(others.inputs), list(others.outputs)
        for places, held in ((inputs, self.inputs), (outputs, self.outputs)):
            for index, (offset, size) in held.items():
                places[index] = (offset - block, size)
        return replace(others, inputs=tuple(inputs), outputs=tuple(outputs))


'''
moved = moved.replace("Layout = TensorLayout | FrameLayout\n", held + "Layout = TensorLayout | FrameLayout | HeldLayout\n")
Path("server/layouts.py").write_text('''"""Where the tensors of a request lie in the io segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gangway.artifact.format import ALIGNMENT_BYTES, TensorSpec
from gangway.executor.frames import Frame
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere


''' + moved)
resolve("server/front_end_messages.py", [
 lambda a,b: a + "    `initial_states`: (input, file with what it has at the start of a sequence).\n", both])
resolve("server/inference.py", [lambda a,b: a.replace("if plan.model.symbols:", "if plan.model.symbols and plan.sequence is None:")])
resolve("server/model_loader.py", ["from collections.abc import Callable, Sequence\nfrom dataclasses import dataclass, replace\n",
 "from gangway.server.loaded_model import LoadedModel\nfrom gangway.server.model_config import BUCKETS_PARAMETER, ConfigError, buckets_of, require_complete\n",
 lambda a,b: b[:b.index("@dataclass(frozen=True, eq=False)")]])
resolve("server/models.py", [
 "    outputs. `load` is another number whenever the model is loaded anew. `isolated_us`: as in ModelReady. `sequence` has\n    what clients do not see of a model with sequences: `inputs` are those that they send.\n",
 lambda a,b: a + "\n    @property\n" + b])
resolve("server/plan.py", [both,
 "    `may_be_cached`: the response cache may answer it, if no tensor is in a region. `members`: of an ensemble.\n    `sequence`: where in a sequence it stands, if the model has those; `waited_ns`: how long until it was its turn there.\n",
 both,
 lambda a,b: "            plan = make_plan(self.models, header, has_raws, self._graphs)\n" + b.split("\n",1)[1],
 lambda a,b: a + b.split("\n",1)[1],
 lambda a,b: b.replace("may_be_cached, step)", "may_be_cached, members, step)").rstrip("\n") + "\n\n\n" + a.split("\n",1)[1].lstrip("\n"),
])
resolve("tests/server/test_repository.py", [lambda a,b: "".join(b.splitlines(True)[:-1]) + a.splitlines(True)[-1]])
resolve("zoo/catalog.py", [both])
