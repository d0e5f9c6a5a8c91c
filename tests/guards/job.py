"""A script as users have it, whose first act is the guard: ``python -m tests.guards.job PLACE [--option ...]``.

It writes what it does into `PLACE`, where a test looks; nothing of the package's tests is imported before the guard.
"""

import lightning_ft as ft

guard = ft.PreemptionGuard()

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

options = argparse.ArgumentParser()
options.add_argument("place", type=Path)
options.add_argument("--devices", type=int, default=1)
options.add_argument("--strategy", default="ddp")
options.add_argument("--workers", type=int, default=0)
options.add_argument("--steps", type=int, default=-1)
options.add_argument("--wait-before-imports", action="store_true")
options.add_argument("--saves-take", type=float, help="what the figures of saves say, in seconds")
options.add_argument("--plain", action="store_true", help="Lightning alone")
options.add_argument("--run-name", default="run")


def main(arguments: argparse.Namespace) -> None:
    place = arguments.place
    if arguments.wait_before_imports:
        (place / "importing").touch()
        while not (place / "go-on").exists():
            os.sched_yield()

    from lightning_ft import events
    from lightning_ft._proof.recorder import Recorder
    from tests.guards.telling import Tell
    from tests.trainer import scenarios as s

    rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))

    if arguments.saves_take:

        def slow(event: events.Event) -> None:
            if isinstance(event, events.Committed):
                event.metrics.update(total_secs=arguments.saves_take, queue_secs=0.0)

        events.observe(slow)
    kwargs = {"strategy": arguments.strategy, "devices": arguments.devices} if arguments.devices > 1 else {}
    kwargs |= {"max_epochs": -1, "max_steps": arguments.steps, "val_check_interval": 20, "default_root_dir": str(place)}
    kwargs |= {"check_val_every_n_epoch": None}
    if arguments.plain:
        trainer = s.plain_trainer(str(place / "checkpoints"), every=10**6, **kwargs)
    else:
        trainer = s.trainer(str(place / "checkpoints"), every=2, ft_args={"guards": [guard]}, **kwargs)
    run = place / arguments.run_name
    run.mkdir(exist_ok=True)
    start = len(list(run.glob(f"*.rank{rank}.jsonl")))
    trainer.callbacks[:0] = [Recorder(str(run / f"{start}.rank{rank}.jsonl")), Tell(place)]
    trainer.fit(s.Net(), *s.shuffled(arguments.workers), ckpt_path="last")
    (place / f"went-on{rank}").touch()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(options.parse_args())
