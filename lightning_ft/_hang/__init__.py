"""`HangGuard` at work in the process that is watched; the one that watches is in `_watcher`."""
