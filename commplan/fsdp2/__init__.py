"""Where plans meet PyTorch FSDP2: `attach` a schedule to a model that `fully_shard` sharded, `describe` one."""

from commplan.fsdp2.attachment import Attachment, Options, attach
from commplan.fsdp2.groups import describe

__all__ = ["Attachment", "Options", "attach", "describe"]
