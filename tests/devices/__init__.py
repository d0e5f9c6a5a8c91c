"""Copies from a device, tested without one: on a device made for it, in a process of its own."""
