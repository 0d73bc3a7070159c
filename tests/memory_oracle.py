"""Communication memory of an accumulated step, told by running it: backward after backward, each op as slow as it may be.

Nothing is known of a plan here, only the layout of the interpreter in `oracle`: a heap of named buffers is filled and emptied
as the language says.  Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from commplan.language.spec import OpLine
from commplan.ops import Kind
from tests.oracle import Item, Layout, blocked_by

BYTES = {"float32": 4, "bfloat16": 2, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Unit:
    """A module: rows and columns of its parameters (sharded by rows), ranks on its axes, and dtypes."""

    shapes: tuple[tuple[int, int], ...]
    axes: tuple[tuple[str, int], ...]
    gradient_dtype: str = "float32"
    reduce_dtype: str = "float32"

    @property
    def ranks(self) -> int:
        """Ranks that share a copy of the gradients."""
        return dict(self.axes).get("shard", 1)

    @property
    def numel(self) -> int:
        """Elements of the unsharded gradients."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def shard_numel(self) -> int:
        """Elements of the shard of one rank, the last one's padding included."""
        return sum(-(-rows // self.ranks) * columns for rows, columns in self.shapes)

    def piece_numel(self, piece: int, pieces: int) -> int:
        """Elements of the shard that fall into a piece: the e-th of n into the last of c that begins at e * c / n or before."""
        n = self.shard_numel
        return sum(piece == -(-(e + 1) * pieces // n) - 1 for e in range(n))


@dataclass
class Shards:
    """What a reduction leaves: the bytes of one buffer, and the modules in it that are not applied yet."""

    size_bytes: int
    left: set[int]


@dataclass
class Heap:
    """What is alive. A label is a kind and what tells its buffers apart."""

    layout: Layout
    units: tuple[Unit, ...]
    items: list[Item] = field(default_factory=list)
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    shards: dict[str, Shards] = field(default_factory=dict)
    scattered: dict[int, str] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    gone: dict[int | None, list[Callable[[], object]]] = field(default_factory=dict)
    is_last: bool = False
    most_bytes: int = 0

    def __post_init__(self) -> None:
        self.items = [item for item in self.layout.items() if not item.left_out]
        every = self.layout.items()
        self.steps = [item.name for item in self.items if item.modules or item.name.startswith("wait")]
        self.known = {item.name: self.when_known(item, every) for item in self.items if item.modules}
        self.last_pieces = {self.bucket(item): item.name for item in self.items if item.modules}

    def when_known(self, item: Item, every: list[Item]) -> int | None:
        """The first step of compute that an op which never ends holds up, or that it is itself."""
        stuck = blocked_by(every, item.name)
        on_compute = (other.name for other in every if other.lane == "compute" and other.name in {*stuck, item.name})
        return next((self.steps.index(name) for name in on_compute if name in self.steps), None)

    def bucket(self, item: Item) -> str:
        """The name of an op without its piece."""
        return item.name.split("[")[0]

    def line(self, kind: Kind, n: int) -> OpLine | None:
        """The line of the op of a kind that module n has."""
        lines = [line for _, _, line in self.layout.lines() if isinstance(line, OpLine) and line.kind is kind]
        return lines[0] if lines and self.layout.needed(kind, n) else None

    def runs(self, kind: Kind, n: int) -> bool:
        """Whether the op of a kind does anything for module n in this backward; an apply does if the last reduction does."""
        if kind is Kind.APPLY:
            reductions = [k for k in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE) if self.line(k, n) is not None]
            return not reductions or self.runs(reductions[-1], n)
        line = self.line(kind, n)
        return line is not None and (self.is_last or line.when == "every")

    def packer(self, n: int) -> Kind:
        """What takes the gradients of module n."""
        return next(kind for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY) if self.line(kind, n) is not None)

    def backward(self, *, is_last: bool) -> list[int]:
        """One more backward: bytes alive at each step."""
        self.is_last = is_last
        self.gone = {}
        for name, shards in self.shards.items():
            self.bytes["partial", name] = shards.size_bytes
            del self.bytes["shard", name]
        self.shards = {}
        found = []
        for item in self.items:
            if item.name not in self.steps:
                self.open(item.name)
                continue
            self.most_bytes = 0
            if item.modules and item.kind is not Kind.ALL_GATHER and self.runs(item.kind or Kind.COMPUTE, item.modules[0]):
                self.start(item)
            self.look()
            found.append(self.most_bytes)
            for leave in self.gone.pop(len(found) - 1, []):
                leave()
        for leave in self.gone.pop(None, []):
            leave()
        assert not self.gone
        return found

    def look(self) -> None:
        """Remember how much is alive now, if it is the most in this step."""
        self.most_bytes = max(self.most_bytes, sum(self.bytes.values()))

    def open(self, name: str) -> None:
        """Another hook: gradients that are still there outlive theirs. Those of its module join what was not reduced before."""
        for n in self.fresh:
            unit = self.units[n]
            own, reduced = BYTES[unit.gradient_dtype], BYTES[unit.reduce_dtype]
            self.bytes["gradient", str(n)] = unit.numel * (own if self.runs(self.packer(n), n) else max(own, reduced))
        self.fresh = set()
        if name.startswith("compute") and ("gradient", name.removeprefix("compute_")) not in self.bytes:
            self.fresh = {int(name.removeprefix("compute_"))}

    def start(self, item: Item) -> None:
        """Issue one piece of an op: what it takes until compute knows it to be over. Gradients leave in between."""
        name, over = self.bucket(item), self.known[item.name]
        units = [self.units[n] for n in item.modules]
        reduced = BYTES[units[0].reduce_dtype]
        line = self.line(item.kind or Kind.COMPUTE, item.modules[0])
        assert line is not None
        wire = BYTES[line.dtype or units[0].reduce_dtype]
        casts = line.dtype is not None and BYTES[line.dtype] != reduced
        shard_numel = sum(unit.shard_numel for unit in units)
        is_packer = self.packer(item.modules[0]) is item.kind
        is_last_piece = self.last_pieces[name] == item.name
        scatters = item.kind is Kind.REDUCE_SCATTER
        if scatters:
            self.scattered.update(dict.fromkeys(item.modules, name))
        is_interleaved = len(units) > 1 and item.pieces > 1
        shard = Shards(shard_numel * reduced, set(item.modules))
        makes_shard = is_packer and item.piece == 0 and item.kind is not Kind.APPLY
        if scatters:
            self.bytes["input", name] = shard_numel * units[0].ranks * wire
        elif makes_shard:
            self.keep(name, shard)
        # Gradients are packed into that, and let go of. Only then is there anything else.
        self.look()
        if is_packer and item.piece == 0:
            for n in item.modules:
                self.take(n)
        if item.kind is Kind.APPLY:
            self.later(over, *(self.applied(n) for n in item.modules))
        elif scatters:
            if makes_shard:
                self.keep(name, shard)
            self.bytes["copy", name] = shard_numel * wire * (casts or is_interleaved)
            if is_last_piece:
                self.later(over, *(self.dropped(kind, name) for kind in ("input", "copy", "partial")))
        elif casts or is_interleaved or len({self.scattered.get(n, "") for n in item.modules}) > 1:
            self.bytes["copy", item.name] = sum(unit.piece_numel(item.piece, item.pieces) for unit in units) * wire
            self.later(over, self.dropped("copy", item.name))

    def keep(self, name: str, shard: Shards) -> None:
        """A shard is there from now on."""
        self.shards[name] = shard
        self.bytes["shard", name] = shard.size_bytes

    def later(self, step: int | None, *leave: Callable[[], object]) -> None:
        """Do something after a step, or at the end of root."""
        self.gone.setdefault(step, []).extend(leave)

    def dropped(self, kind: str, name: str) -> Callable[[], object]:
        """Lets a buffer go."""
        return lambda: self.bytes.pop((kind, name), None)

    def take(self, n: int) -> None:
        """Let the gradients of a module go: they are packed."""
        self.fresh.discard(n)
        self.bytes.pop(("gradient", str(n)), None)

    def applied(self, n: int) -> Callable[[], object]:
        """Lets the shard of a module go, once all that are in its buffer are `.grad`."""

        def leave() -> None:
            for name, shards in list(self.shards.items()):
                shards.left.discard(n)
                if not shards.left:
                    del self.shards[name], self.bytes["shard", name]

        return leave


def bytes_by_step(layout: Layout, units: tuple[Unit, ...], num_backwards: int) -> list[list[int]]:
    """Communication bytes alive at each step of each backward of an accumulated step."""
    heap = Heap(layout, units)
    found = [heap.backward(is_last=number == num_backwards - 1) for number in range(num_backwards)]
    assert not heap.bytes, "something is left when all is reduced"
    return found
