"""A small process beside each rank that watches it, and ends it when it hangs; the standard library only.

It must notice what no thread of the training can: C code that never gives the interpreter back, a stopped process.
So it is a process of its own, which imports neither torch nor anything that does.

* `page`: one page of memory that the training writes and the watcher reads.
* `limits`: how long is too long; pure.
* `leave`: what the training prepares so that it can be made to leave with an exit code, whatever it is stuck in.
* `start`: the training's side.
* `process`: what the kernel tells of the training.
* `peers`: the watchers of the other ranks.
* `report`: what is said.
* `main`: the watcher's side.
"""
