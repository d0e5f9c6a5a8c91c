"""A language model of Hugging Face `transformers`, on a stream in the style of `datasets`.

    python examples/language_model.py

Model and text are made here, so that nothing is downloaded. `datasets.IterableDataset` has the same two methods as
`Text`, `state_dict` and `load_state_dict`, and can take its place. To start over: rm -r runs/lm
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_ft as ft

TEXT = "the quick brown fox jumps over the lazy dog, and nobody knows how often it has done so before. " * 40


class Text(IterableDataset[dict[str, torch.Tensor]]):
    """Blocks of characters, in an order that is new in every epoch."""

    def __init__(self, block: int) -> None:
        self.blocks = [TEXT[i : i + block] for i in range(0, len(TEXT) - block, block)]
        self.epoch = self.read = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(len(self.blocks), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.read :]:
            self.read += 1
            yield {"input_ids": torch.tensor([ord(character) % 64 for character in self.blocks[index]])}
        self.epoch, self.read = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """What a restart has to know."""
        return {"epoch": self.epoch, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind what was read."""
        self.epoch, self.read = state["epoch"], state["read"]


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        )
        self.model.train()  # `transformers` makes models in evaluation mode, and Lightning leaves them as they are

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    model = LanguageModel()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint("runs/lm", every_n_train_steps=10)],
    )
    trainer.fit(model, StatefulDataLoader(Text(32), batch_size=4), ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
