"""`make bench`: what saving, waiting for nothing and restarting cost, beside the alternatives and the machine's limits.

=================  ====================================================================================
`plan`             how much is measured: sizes, rounds, counts
`limits`           what this machine can do at best with the same bytes
`model`            the trained states: few large tensors, many small ones
`contenders`       the ways to save
`pace`             when a save is let through, and the times of each
`training`         blocked time, time to durable, throughput, heartbeat in a `Trainer` run
`heartbeat`        the longest stillness of the main thread
`memory`           the peak of each of many saves
`idle`             what the callback costs when nothing is due; `attribution` says where
`restart`          from a directory to a loaded, verified checkpoint
`sharded`          sharded saves of two ranks, beside Lightning's own and that of torch
`stores`           a program of its own (`make bench-stores`): uploads and downloads beside those of s3fs
`fresh`            a function called in a process of its own
`figures`          medians and spreads; `targets` what they are to be; `report` and `plot` how they are shown
=================  ====================================================================================
"""
