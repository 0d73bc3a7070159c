"""Train a byte-level model with HSDP: torchrun --standalone --nproc-per-node 4 examples/train.py [TEXT_FILE] [STEPS]."""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commplan

text_path = Path(sys.argv[1] if len(sys.argv) > 1 else random.__file__)
num_steps, context, dim = int(sys.argv[2]) if len(sys.argv) > 2 else 50, 64, 128


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, dropout=0.0, batch_first=True) for _ in range(6))
        self.head = nn.Linear(dim, 256)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Bytes, int64 of shape (batch, context + 1) -> mean cross entropy of predicting each next one."""
        x = self.embedding(window[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), window[:, 1:].flatten())


device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
dist.init_process_group()  # the backend of the device: nccl, hccl or gloo
if device.type != "cpu":
    torch.accelerator.set_device_index(dist.get_node_local_rank())
mesh = dist.init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)  # the same weights on every rank
model = Model().to(device)
for unit in (*model.blocks, model):
    fully_shard(unit, mesh=mesh)
commplan.attach(model, "pipelined_allreduce")  # the one line that is not plain FSDP2
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

text = torch.frombuffer(bytearray(text_path.read_bytes()), dtype=torch.uint8)
torch.manual_seed(1 + dist.get_rank())  # other text on every rank
for step in range(num_steps):
    window = text[torch.randint(len(text) - context, (8, 1)) + torch.arange(context + 1)].long().to(device)
    loss = model(window)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
