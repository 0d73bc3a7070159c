"""What some torch releases lack: marks that skip a test by what it needs, never by a version."""

from __future__ import annotations

import pytest
from torch.distributed import fsdp

from commplan.fsdp2 import torch_releases


def _needs(is_there: bool, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason=f"FSDP2 of this torch {what}")


def has_setting(name: str) -> bool:
    """Whether sharded modules have this public method."""
    return hasattr(fsdp.FSDPModule, name)


remembered_ties = _needs(torch_releases.remembers_ties(), "does not remember which parameters were tied before sharding")
reduced_unused_params = _needs(has_setting("set_reduce_scatter_unused_params"), "has no set_reduce_scatter_unused_params")
reset_of_iterations = _needs(torch_releases.resets_iterations(), "has no reset_iter_state")
groups_over_several_meshes = _needs(
    torch_releases.has_groups_over_several_meshes(), "shards the parameters of one module over one mesh only"
)
axes_of_one_mesh = _needs(hasattr(fsdp, "DataParallelMeshDims"), "does not shard parameters that are distributed over all axes")
