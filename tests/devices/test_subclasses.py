"""Tensors of a subclass, wherever they say they are: copied before `stage` returns, whatever may be late."""

from __future__ import annotations

import torch
from torch import nn

from lightning_ft._copying.copies import is_streamed
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.staging import Stager
from tests.devices import fake_gpu
from tests.devices.scenarios import assert_same, tensors


def model() -> nn.Module:
    torch.manual_seed(1)
    return fake_gpu.moved(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))


def test_they_say_they_are_on_a_device() -> None:
    with fake_gpu.cuda_is_here():
        weight = model()[0].weight
        assert (weight.is_cuda, is_streamed(weight.device)) == (True, True)
        assert weight.to("cpu", non_blocking=True).isnan().all(), "a copy that nobody waited for"
        assert len(fake_gpu.queued) == 1
        assert torch.equal(weight.to("cpu"), weight.inner)


def test_they_are_copied_at_once_and_without_the_device() -> None:
    with fake_gpu.cuda_is_here():
        module = model()
        expected = {name: tensor.inner.clone() for name, tensor in module.state_dict().items()}
        stager = Stager(overlap=True)
        late = Late.of(ModuleTree(module), [], 0)
        for _ in range(2):
            staged = stager.stage({"state_dict": dict(module.state_dict()), "more": [module[0].weight]}, late)
            held = {name: tensor.inner.clone() for name, tensor in module.state_dict().items()}
            for tensor in module.state_dict().values():
                tensor.fill_(7)
            stager.finish()
            snapshot = staged.wait()
            assert_same(snapshot["state_dict"], held)
            assert {type(tensor) for tensor in tensors(snapshot)} == {torch.Tensor}
            assert not staged._plan.buffers.pinned
            assert fake_gpu.queued == []
            staged.release()
        assert_same(expected.keys(), held.keys())
        stager.close()


def test_beside_them_plain_tensors_are_copied_late() -> None:
    with fake_gpu.cuda_is_here():
        plain, module = nn.Linear(64, 64), model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        checkpoint = {"state_dict": {**plain.state_dict(prefix="plain."), **module.state_dict(prefix="odd.")}}
        expected = {k: fake_gpu.inner_of(v).clone() for k, v in checkpoint["state_dict"].items()}
        stager = Stager(overlap=True)
        staged = stager.stage(checkpoint, Late.of(ModuleTree(plain), [optimizer], 0))
        for tensor in module.state_dict().values():
            tensor.fill_(7)
        stager.finish()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.fill_(7)
        assert_same(staged.wait()["state_dict"], expected)
        staged.release()
        stager.close()
