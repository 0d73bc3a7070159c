"""torch's underscore names have one home, and what is used of them is in the fingerprint by which a torch is accepted."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from commplan.fsdp2 import torch_releases as releases

ROOT = Path(__file__).resolve().parents[2]


# One home.


def private_names(source: str) -> list[str]:
    """Underscore names in `source` that are not its own: imported ones, those of other objects, and those in strings."""
    tree = ast.parse(source)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and is_self(n)}
    own |= {part for n in ast.walk(tree) if isinstance(n, ast.Assign) for part in slots(n)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [*(alias.name for alias in node.names), getattr(node, "module", "") or ""]
            found.extend(p for p in paths if p != "__future__" and any(part.startswith("_") for part in p.split(".")))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and is_private(str(node.value)) and node.value not in own:
            found.append(str(node.value))
    return found


def is_private(name: str) -> bool:
    return re.fullmatch(r"_+[a-zA-Z]\w*(?<!__)", name) is not None


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def slots(node: ast.Assign) -> list[str]:
    is_slots = any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets)
    return [str(e.value) for e in ast.walk(node.value) if isinstance(e, ast.Constant)] if is_slots else []


FILES = [
    path
    for room in ("execute", "fsdp2")
    for path in sorted((ROOT / "commplan" / room).glob("**/*.py"))
    if not (room == "fsdp2" and path.name.startswith("torch_"))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_private_names_have_one_home(path: Path) -> None:
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "group._training_state = 1",
        "print(dist.distributed_c10d._world)",
        "from torch.distributed.fsdp._fully_shard import FSDPModule",
        "import torch._dynamo",
        "from torch.distributed import _functional_collectives as fc",
        "getattr(p, '_post_accumulate_grad_hooks', None)",
        "setattr(group, '_all_reduce_hook', None)",
        "vars(group)['_all_gather_comm'] = None",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert private_names(f"class A:\n    def f(self, group, p):\n        {line}\n")


def test_own_names_are_not() -> None:
    assert (
        private_names(
            "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x\n"
        )
        == []
    )


# In the fingerprint.

RelyingOn = Mapping[str, tuple[str, ...]]


def used_names(source: str) -> set[str]:
    """Underscore names of others in `source`, and public attributes."""
    found = {part for name in private_names(source) for part in name.split(".") if is_private(part)}
    attributes = (node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return found | {name for name in attributes if not name.startswith("_")}


def pinned_names(relied_on: RelyingOn) -> set[str]:
    """What cannot change without the fingerprint: the functions that it reads, and whatever these mention."""
    found: set[str] = set()
    for module_name, names in relied_on.items():
        found.update(module_name.split("."))
        for name in names:
            code = releases._code(importlib.import_module(module_name), name)
            found.update(name.split("."), re.findall(r"'(\w+)'", code or ""))
    return found


@functools.cache
def tree_of(module_name: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module_name)))


def attributes_of_fsdp2() -> set[str]:
    """Names that FSDP2's modules give to attributes of their objects."""
    found = set()
    for node in (node for name in releases.RELIED_ON if name.startswith(releases.FSDP2) for node in ast.walk(tree_of(name))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def functions_of_torch() -> Iterator[str]:
    """Functions of the modules that are relied on, and methods of the classes: FSDP2's, and private ones of others."""
    for module_name, names in releases.RELIED_ON.items():
        classes = {name.split(".")[0] for name in names if "." in name}
        holders = [c for c in tree_of(module_name).body if isinstance(c, ast.ClassDef) and c.name in classes]
        for holder in (tree_of(module_name), *holders):
            found = [node.name for node in holder.body if isinstance(node, ast.FunctionDef)]
            yield from (n for n in found if is_private(n) or (module_name.startswith(releases.FSDP2) and not n.endswith("__")))


@functools.cache
def is_in_torch(name: str) -> bool:
    folder = Path(torch.__file__).parent
    return any(name in path.read_text() for where in ("distributed/**/*.py", "*.py") for path in folder.glob(where))


def lacking(source: str) -> set[str]:
    """Names that `source` only asks for, since some releases or vendors lack them, and that this torch lacks."""
    calls = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    asking = (call for call in calls if getattr(call.func, "id", "") in ("getattr", "hasattr"))
    asked = {str(call.args[1].value) for call in asking if isinstance(call.args[1], ast.Constant)}
    return {name for name in asked if not is_in_torch(name)}


# No fingerprint can hold what is written in C++. Whoever uses these compares what they say of one object and of another, or
# does without them where they are not what they should be.
COMPARED = {"_cdata", "_storage_Use_Count", "_set_default_timeout", "_timeout"}


def unpinned(source: str, relied_on: RelyingOn = releases.RELIED_ON) -> list[str]:
    """Names of torch's that `source` uses, and that may change while the fingerprint stays the same."""
    names = used_names(source) - lacking(source) - COMPARED
    read = {name for name in names if is_private(name)} | (names & attributes_of_fsdp2())
    listed = {name.split(".")[-1] for of_module in relied_on.values() for name in of_module}
    return sorted((read - pinned_names(relied_on)) | (names.intersection(functions_of_torch()) - listed))


def loaded(room: Path) -> set[Path]:
    """The files of `room` that are loaded with it."""
    found: set[Path] = set()
    todo = [room / "__init__.py"]
    while todo:
        path = todo.pop()
        if path.exists() and path not in found:
            found.add(path)
            lines = (line for line in path.read_text().splitlines() if line.startswith("from commplan.fsdp2"))
            todo.extend(room / f"{word}.py" for line in lines for word in re.findall(r"\w+", line))
    return found


HOME = sorted(path for path in loaded(ROOT / "commplan" / "fsdp2") if path.name.startswith("torch_"))


@pytest.mark.parametrize("path", HOME, ids=lambda path: path.name)
def test_what_is_used_is_in_the_fingerprint(path: Path) -> None:
    assert unpinned(path.read_text()) == []


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("FSDPParamGroup.unshard", "_all_gather_comm"),
        ("FSDPParamGroup.reshard", "reshard"),
        ("FSDPState._register_root_post_backward_final_callback", "_register_root_post_backward_final_callback"),
        ("FSDPParam.unsharded_grad_data", "unsharded_grad_data"),
        ("is_bw", "_current_graph_task_id"),
        ("_device_capability", "_device_types"),
        ("_set_is_profiler_enabled", "_is_profiler_enabled"),
    ],
)
def test_what_the_fingerprint_lacks_is_found(function: str, missing: str) -> None:
    less = {module: tuple(name for name in names if name != function) for module, names in releases.RELIED_ON.items()}
    assert missing in {name for path in HOME for name in unpinned(path.read_text(), less)}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("group._no_such_name = 1", "_no_such_name"),
        ("vars(group)['_no_such_name']", "_no_such_name"),
        ("param.alloc_all_gather_outputs()", "alloc_all_gather_outputs"),
        ("getattr(group, '_use_post_forward_mesh', False)", "_use_post_forward_mesh"),
        ("dist.distributed_c10d._new_group_with_tag([0])", "_new_group_with_tag"),
    ],
)
def test_another_name_is_found(line: str, name: str) -> None:
    assert name in unpinned(f"def f(group, param, dist):\n    {line}\n")
