"""The command line: thin wrappers around the engine, which they import only when a command runs."""
