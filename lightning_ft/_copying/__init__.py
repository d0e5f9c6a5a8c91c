"""The copy of a state that training can no longer change: structure, places, memory, and when it is over."""
