"""Local files and directories: written past the page cache, hashed on the way, durable when they are published."""
