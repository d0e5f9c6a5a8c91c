"""What happened to a run, in files beside its checkpoints, and how often to save in the light of it."""
