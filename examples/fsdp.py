"""A model whose weights are spread over two ranks, with checkpoints that are spread alike.

    python examples/fsdp.py

`ft.FSDPStrategy` takes the arguments of Lightning's. Nothing is gathered: each rank copies, writes and reads its own
part. `lightning-ft consolidate runs/fsdp/<name> model.ckpt` makes an ordinary file of one.
To start over: rm -r runs/fsdp
"""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    inputs = torch.randn(960, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=ft.FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded"),
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint("runs/fsdp", every_n_train_steps=10)],
    )
    model = Regression()
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True), ckpt_path="last")
    # What this rank holds, summed over the ranks.
    assert trainer.model is not None
    held = torch.stack([parameter.detach().double().sum() for parameter in trainer.model.parameters()]).sum()
    total = trainer.strategy.reduce(held, reduce_op="sum")
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
